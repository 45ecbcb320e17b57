"""What every adapter that saves files of a framework must do, beside the framework alone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import short
import torch
from framework_loops import LOOPS, Loop
from hold import GATE, held

from datastates import _native
from datastates._base import faults
from datastates.commit.pending import Pending, is_begun
from datastates.errors import SnapshotAbandonedError, StorageError
from datastates.files import looks
from datastates.files.torch_files import TorchFiles
from datastates.files.transaction import Transaction
from datastates.storage import Location
from datastates.testing.provider_tests import difference

safetensors = pytest.importorskip("safetensors.torch")
safe_open = safetensors.safe_open  # as a program has it: imported before anything is saved
pytestmark = pytest.mark.filterwarnings("ignore")  # from the frameworks themselves
Make = Callable[..., Any]
SEEN = (Transaction, ("see", "wait"))
"""The waits of code that looks at a checkpoint, and of the calls that need its end."""


def needed(name: str) -> type[Loop]:
    pytest.importorskip(name, reason=f"{name} is not installed: its tests did NOT run")
    return LOOPS[name]


@pytest.fixture(params=LOOPS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a loop which saves below a folder, with this package or without it."""
    made: list[Loop] = []

    def build(name: str = "run", **options: Any) -> Loop:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(needed(request.param)(tmp_path / name, **options))
        made[-1].train()
        return made[-1]

    yield build
    _native.clear_faults()
    faults.clear()
    for one in made:
        with contextlib.suppress(StorageError):
            one.close()


def holding(one: Any) -> contextlib.AbstractContextManager[None]:
    """Nothing that this package saves in the block is complete before somebody needs it."""
    return held("sync", until=SEEN) if one.files is not None else contextlib.nullcontext()


@contextlib.contextmanager
def behind(one: Any) -> Iterator[None]:
    """What is saved in the block may end only after it: a checkpoint that came before has not ended."""
    go = threading.Event()
    one.files.begin()
    one.files.put(one.files.transaction("what comes before", lambda _: go.wait()))
    try:
        yield
    finally:
        go.set()


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@looks.unwatched()
def there(one: Any) -> list[int]:
    """The numbers of the checkpoints that have their names, as another process sees it."""
    return [number for number in range(9) if (one.path(number) / one.file).exists()]


def debris(one: Any) -> list[str]:
    return [name for name in names(one.root) if "partial" in name]


def read(file: Path) -> Any:
    """What torch finds in a file, or its bytes."""
    is_torchs = file.suffix in (".pt", ".pth", ".bin", ".ckpt")
    return torch.load(file, weights_only=False) if is_torchs else file.read_bytes()


@pytest.mark.long
def test_each_goes_on_bit_for_bit_from_what_the_other_saved(make: Make) -> None:
    ends, both = [], (make("stock", lazy=False), make("ours"))
    for one in both:
        torch.manual_seed(7)
        one.save(1)
        one.train(2)
        ends.append(one.state())
        one.close()
    assert difference(*ends) is None
    stock, ours = ({str(p.relative_to(one.root)): p for p in one.root.rglob("*") if p.is_file()} for one in both)
    assert stock.keys() == ours.keys()
    for name in stock.keys() - {"checkpoint-1/training_args.bin"}:  # it has the path
        assert difference(read(stock[name]), read(ours[name])) is None, name
    for saved in both:
        for lazy in (False, True):
            other = make(saved.root.name, lazy=lazy)
            other.train()
            other.load(1)
            other.steps = 1
            other.train(2)
            assert difference(other.state(), ends[0]) is None


def test_capture_goes_on_in_forward_and_backward_and_the_update_waits(make: Make) -> None:
    one, other = make(), make(lazy=False)
    for each in (one, other):
        each.net.table = torch.nn.Parameter(torch.zeros(4096, 16))
        each.net.register_buffer("codes", torch.zeros(4096, 16))
    saved = one.state()
    with held("capture", until=GATE):
        one.save(1)
        one.forward()
        snapshots = one.files.saves[-1].written
        assert not all(snapshot.captured for snapshot in snapshots), "forward or backward waited"
        # what no optimizer guards is copied: a library sets unused codes of a codebook anew in a forward pass
        for late in [one.net.codes, *([one.net.table] if one.knows_optimizers else [])]:
            late.data[1000:1010] += 1  # few rows: no fingerprint sees it
        one.train()
    one.close()
    other.load(1)
    assert difference(other.state(), saved) is None
    assert difference(one.state(), saved) is not None


def beside(path: Path, write: Callable[[Path], object]) -> list[str]:
    """The files once something more has been written into the folder of a large file."""
    write(path if path.is_dir() else path.parent)
    return names(path.parent)


def linked(path: Path) -> bool:
    (path.parent / "link").symlink_to(path.name)
    with looks.unwatched():
        return (path.parent / "link").exists()


LIST = "import os, sys; print(sorted(os.listdir(sys.argv[1])))"
TENSORS = {"t": torch.ones(2)}
LOOKS: dict[str, Callable[[Path, Path], object]] = {  # tests/files/test_looks.py has more
    "listdir": lambda path, file: sorted(os.listdir(file.parent)),
    "rglob": lambda path, file: names(path.parent),
    "exists": lambda path, file: (path.exists(), file.exists(), os.path.getsize(file) > 0),
    "torch.load": lambda path, file: sorted(torch.load(file, weights_only=True)),
    "safe_open": lambda path, file: [sorted(safe_open(f, "pt").keys()) for f in path.glob("*.safetensors")],
    "load_file": lambda path, file: [sorted(safetensors.load_file(f)) for f in path.glob("*.safetensors")],
    "copytree": lambda path, file: names(Path(shutil.copytree(path.parent, path.parent.parent / f"{id(path)}"))),
    "move": lambda path, file: (path.rename(path.parent / "best"), names(path.parent))[1],
    "link": lambda path, file: linked(path),
    "program": lambda path, file: subprocess.check_output([sys.executable, "-c", LIST, str(file.parent)]),
    "write_text": lambda path, file: beside(path, lambda f: (f / "notes.txt").write_text("x")),
    "a hidden file": lambda path, file: beside(path, lambda f: (f / ".notes").write_text("x")),
    "torch.save": lambda path, file: beside(path, lambda f: torch.save(1, f / "more.pt")),
    "save_file": lambda path, file: beside(path, lambda f: safetensors.save_file(TENSORS, f / "more.safetensors")),
    "mkdir": lambda path, file: beside(path, lambda f: (f / "more").mkdir()),
    "a folder that is there": lambda path, file: beside(path, lambda f: f.mkdir(exist_ok=True)),
    "chdir": lambda path, file: beside(path, lambda f: (os.chdir(f), Path("here").touch())),
    "delete": lambda path, file: (shutil.rmtree(path) if path.is_dir() else path.unlink(), names(path.parent)),
}


@pytest.fixture(scope="module", params=LOOPS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """The loop without this package, and the one with it. The tests that share them choose a folder each."""
    made: list[Any] = [needed(request.param)(tmp_path_factory.mktemp("seen"), lazy=lazy) for lazy in (False, True)]
    for one in made:
        one.train()
    yield made
    for one in made:
        one.close()


@pytest.mark.long
@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_sees_what_the_framework_leaves(
    look: str, both: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.chdir(tmp_path)
    for one in both:
        one.root = tmp_path / str(one.files is None) / "run"
        one.root.mkdir(parents=True)
        with holding(one):
            one.save(1)
            found.append(LOOKS[look](one.path(1), one.path(1) / one.file))
    assert found[0] == found[1]


def test_of_two_saves_to_one_place_the_later_stays_and_other_files_stay(make: Make) -> None:
    both = make("stock", lazy=False), make("ours")
    for one in both:
        if one.file:
            one.path(1).mkdir()
            (one.path(1) / "notes.txt").write_text("of an earlier run")
        with holding(one):
            for _ in range(2):
                one.train()
                one.save(1)
            late = one.state()
            one.train()
            one.load(1)
        assert difference(one.state(), late) is None
        one.close()
    assert names(both[0].root) == names(both[1].root)


def test_so_many_are_under_way_and_they_end_in_their_turn(make: Make, tmp_path: Path) -> None:
    one = make(max_in_flight=2)
    with held("sync", until=SEEN):
        for number in range(2):
            one.save(number)
        one.forward()  # nothing of this waits
        torch.save({"a": 1}, tmp_path / "elsewhere.pt")
        torch.load(tmp_path / "elsewhere.pt", weights_only=True)
        assert [save.ended for save in one.files.saves] == [False, False]
        assert there(one) == []
        one.save(2)  # it waits for the first
        assert len(one.files.saves) == 2
        assert there(one)[:1] == [0]
    one.files.wait()
    with behind(one):
        one.save(3)
        for snapshot in one.files.saves[-1].written:
            snapshot.wait_committed()
        assert there(one) == [0, 1, 2]
    one.close()
    assert (there(one), debris(one)) == ([0, 1, 2, 3], [])


def told(call: Callable[[], object]) -> StorageError | None:
    try:
        call()
    except StorageError as error:
        return error
    return None


@pytest.mark.long
@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("where", ["write", "store.rename", "store.mkdir"])
def test_a_failure_costs_its_checkpoint_and_is_told_once(where: str, on_error: str, make: Make, caplog: Any) -> None:
    one = make(max_in_flight=1, on_error=on_error)
    one.save(0)
    one.files.wait()
    if where == "write":
        _native.arm_fault(where, "fail", errno.ENOSPC, 1, 1)
    else:
        faults.arm(faults.Fault(where, "fail", errno.ENOSPC))
    raised = []
    for number in range(1, 5):
        raised.append(told(partial(one.save, number)))
        one.files.wait()
        faults.clear()
    saved = [0, *(number for number in range(2, 5) if raised[number - 1] is None)]
    errors = list(filter(None, [*raised, told(one.close)]))
    assert told(one.close) is None
    assert (there(one), debris(one)) == (saved, [])
    assert all("No space left" in str(error) and str(one.root) in str(error) for error in errors)
    if on_error == "warn":
        assert (errors, one.files.failures) == ([], 1)
        (line,) = [message for message in caplog.messages if "has failed" in message]
        assert str(one.path(1)) in line or line.startswith("the checkpoint 1 ")
        assert "No space left" in line
    elif where == "store.mkdir":  # the call itself raises, and a later one may
        assert raised[0] is errors[0]
    else:
        assert errors == raised[1:2]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["write", "put"])
def test_an_interrupted_save_leaves_nothing_or_all(name: str, late: bool, make: Make, monkeypatch: Any) -> None:
    one, stock, interrupts = make(on_error="warn"), getattr(TorchFiles, name), [KeyboardInterrupt]

    def interrupted(*words: Any, **options: Any) -> Any:
        if late or not interrupts:
            found = stock(*words, **options)
        if interrupts:
            raise interrupts.pop()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(TorchFiles, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.save(1)
    one.files.wait()
    whole = there(one)
    assert whole in ([], [1] if late and name == "put" else [])
    one.save(2)
    saved = one.state()
    one.train()
    one.load(2)
    assert difference(one.state(), saved) is None
    one.close()
    assert (there(one), debris(one)) == ([*whole, 2], [])


def test_a_forked_child_neither_saves_nor_waits(make: Make) -> None:
    one = make()
    with held("sync"):
        one.save(1)
        if (child := os.fork()) == 0:
            for call in (one.files.wait, lambda: one.save(2)):
                try:
                    call()
                except SnapshotAbandonedError:
                    continue
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.close()
    assert there(one) == [1]


@pytest.mark.parametrize("make", [n for n in LOOPS if n != "deepspeed"], indirect=True)  # whose engines take turns
def test_what_another_run_is_writing_stays_and_what_one_left_is_removed(make: Make, caplog: Any) -> None:
    one, other = make(), make()
    alive, dead = (Pending(one.root / f".{one.path(number).name}").begin() for number in (77, 78))
    for pending in (alive, dead):  # as between the two renames that replace a checkpoint
        for folder in ("old", "."):
            (Path(pending.directory) / folder / one.path(78).name).mkdir(parents=True)
    dead.close()
    with behind(one):
        one.save(1)
        with looks.unwatched():
            assert any(is_begun(Location(path)) for path in one.root.glob(f".{one.path(1).name}.partial-*"))
        other.save(2)
        other.close()
    one.close()
    assert (there(one), [name for name in debris(one) if "/" not in name]) == ([1, 2], [alive.directory.name])
    assert one.path(78).exists() == bool(one.file), "the checkpoint that was moved aside is there again"
    alive.abandon()
    said = [record.getMessage() for record in caplog.records if record.name == "datastates"]
    assert [line for line in said if "debris" not in line] == []


IMPORTED = {
    "lightning": ("lightning.pytorch", "torch.distributed.checkpoint"),
    "accelerate": ("accelerate", "torch.distributed.fsdp"),
    "transformers": ("accelerate", "transformers.models.llama.modeling_llama", "transformers.trainer"),
}
FAULTS = {
    "lightning": ["write=kill@7", "sync=kill@2", "store.rename=kill@2"],
    "accelerate": ["store.sync_directory=kill@4", "write=kill@20", "sync=kill@3"],
    "transformers": ["sync=kill@3", "write=kill@14", "store.sync_directory=kill@2", "store.rename=kill@2"],
}
KILLED = short.first([(name, fault) for name in FAULTS for fault in FAULTS[name]], rest=pytest.mark.by_hand)
SEVERAL = {
    "accelerate, DDP": ("accelerate/training.py",),
    "accelerate, FSDP2": ("accelerate/training.py", "fsdp2"),
    "transformers, DDP": ("transformers/training.py",),
    "transformers, FSDP2": ("transformers/training.py", "fsdp2"),
    "lightning, FSDP2": ("lightning/sharded.py",),
}


class Program:
    """A program that trains in a folder for some steps, and resumes what is there; ``run`` gives what it says."""

    def __init__(self, ranks: Any, said: Any, file: str, *words: str) -> None:
        self._ranks, self._said, self._words = ranks, said, words
        self._file, name = Path(__file__).parent / file, file.partition("/")[0]
        needed(name)
        self.options = {"imported": IMPORTED[name], "timeout": 200, "ACCELERATE_USE_CPU": "true", "NODE_RANK": "0"}
        self.options |= {"PYTHONPATH": str(self._file.parent), "TOKENIZERS_PARALLELISM": "false"}

    def run(self, n: int, root: Path, steps: int, *words: str, **options: Any) -> tuple[dict[str, Any], Any]:
        """Returns where it began and its losses, and the state at the end."""
        done, *_ = self._ranks(n, self._file, root, steps, *self._words, *words, **self.options, **options)
        if options.get("may_fail"):
            assert done.returncode == -signal.SIGKILL, done.stderr
            return {}, None
        return self._said(done)["trained"], torch.load(f"{root}-end.pt", weights_only=True)


@pytest.mark.by_hand
@pytest.mark.parametrize(("name", "fault"), KILLED)
def test_killed_in_a_save_it_resumes_bit_for_bit(name: str, fault: str, ranks: Any, said: Any, tmp_path: Path) -> None:
    program, killed = Program(ranks, said, f"{name}/training.py"), tmp_path / "killed"
    whole, end = program.run(1, tmp_path / "whole", 16, "stock", alone=True)
    # one checkpoint at a time: the first has its name before the second begins, and the kill comes in the second
    program.run(1, killed, 16, alone=True, may_fail=[0], DATASTATES_FAULTS=fault, MORE='{"max_in_flight": 1}')
    resumed, again = program.run(1, killed, 16, alone=True)
    assert resumed["from"] in ((5, 10) if "directory" in fault else (4, 5))  # then it may have its name already
    assert resumed["losses"] == whole["losses"][resumed["from"] :]
    assert difference(again, end) is None
    assert [name for name in names(killed) if "partial" in name] == []  # a save has removed what was left


@pytest.mark.by_hand
@pytest.mark.parametrize("program", short.first(reversed(SEVERAL), rest=pytest.mark.by_hand))
def test_several_ranks_save_one_folder_and_each_loads_the_others(
    program: str, ranks: Any, said: Any, tmp_path: Path
) -> None:
    runs, loop = {}, Program(ranks, said, *SEVERAL[program])
    for saves, loads in (([], ["stock"]), (["stock"], [])):
        root = tmp_path / f"by {'stock' if saves else 'ours'}"
        whole, end = loop.run(2, root, 11, *saves)
        for last in root.glob("checkpoint-11"):  # the Trainer's at the end of a run
            shutil.rmtree(last)
        runs[root.name] = whole["losses"], sorted(n for n in names(root) if not n.endswith((".distcp", "config.json")))
        resumed, again = loop.run(2, root, 11, *loads)
        assert resumed["from"] in (8, 10)
        assert resumed["losses"] == whole["losses"][resumed["from"] :]
        assert difference(again, end) is None
    ours, stock = runs.values()
    assert ours == stock
    assert any(".metadata" in name for name in ours[1]) == ("FSDP2" in program)
