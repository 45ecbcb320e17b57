"""``save_state`` and ``load_state`` of accelerate: captured lazily, complete or absent, in its own folders."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from by_path import module_at
from hold import GATE, held

from datastates import _native
from datastates.errors import CommitError, SettingsError, StorageError
from datastates.files import looks
from datastates.files.transaction import Transaction

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # from accelerate itself
IMPORTED = ("accelerate", "torch.distributed.fsdp")


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def folders(project: Path) -> set[str]:
    return {path.name for path in (project / "checkpoints").iterdir()}


class _WithModes(torch.optim.SGD):
    """As schedule-free optimizers: for training the parameters have other values than for an evaluation."""

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            torch._foreach_neg_(group["params"])

    eval = train


def test_parameters_that_the_mode_of_an_optimizer_changes_are_copied(training: ModuleType, tmp_path: Path) -> None:
    loop = training.Loop(tmp_path)
    loop.accelerator._optimizers.clear()
    loop.optimizer = loop.accelerator.prepare(_WithModes(loop.net.parameters(), lr=0.1, momentum=0.9))
    loop.optimizer.train()
    loop.forward()
    loop.optimizer.step()
    loop.optimizer.eval()
    expected = {name: tensor.clone() for name, tensor in loop.net.state_dict().items()}
    with held("capture", until=GATE):
        final = loop.accelerator.save_state()
        loop.optimizer.train()
        loop.forward()
        loop.optimizer.step()
    loop.accelerator.end_training()
    weights = load_file(final / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_the_oldest_are_deleted_once_a_new_one_is_complete(training: ModuleType, tmp_path: Path) -> None:
    loop = training.Loop(tmp_path, total_limit=2)
    for number in range(4):
        loop.accelerator.project_configuration.iteration = number
        loop.accelerator.save_state()
    loop.accelerator.load_state()  # the newest; it waits until that is complete
    assert folders(tmp_path) == {"checkpoint_2", "checkpoint_3"}
    loop.accelerator.project_configuration.iteration = 3
    with pytest.raises(ValueError, match="already exists"):
        loop.accelerator.save_state()
    _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
    loop.accelerator.project_configuration.iteration = 4
    loop.accelerator.save_state()
    with pytest.raises(StorageError, match="No space"):
        loop.accelerator.end_training()
    assert folders(tmp_path) == {"checkpoint_2", "checkpoint_3"}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_disk_that_is_full_for_a_small_file_ends_training_only_if_it_is_to(
    on_error: str, training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setitem(training.OPTIONS, "on_error", on_error)
    loop = training.Loop(tmp_path)
    accelerator = loop.accelerator

    def fill(models: Any, weights: Any, folder: str) -> None:
        (Path(folder) / "random_states_0.pkl").symlink_to("/dev/full")

    hook = accelerator.register_save_state_pre_hook(fill)
    loop.train(4)
    if on_error == "raise":
        with pytest.raises(StorageError, match="No space left") as told:
            loop.train(5)
        assert str(tmp_path) in str(told.value.filename)
        loop.checkpoints.wait()
    else:
        loop.train(5)
        loop.checkpoints.wait()
        (line,) = [m for m in caplog.messages if "has failed" in m]
        assert "checkpoint_1" in line
        assert "No space left" in line
        assert loop.checkpoints.files.failures == 1
    assert not list(tmp_path.rglob("checkpoint_1*"))
    hook.remove()
    loop.train(10)
    with contextlib.suppress(StorageError):  # it is raised again at the end
        accelerator.end_training()
    assert "checkpoint_2" in folders(tmp_path)


def test_a_folder_of_its_own_choice_is_written_as_accelerate_writes_it(training: ModuleType, tmp_path: Path) -> None:
    trees = []
    for name in ("stock", "ours"):
        loop = training.Loop(tmp_path / name, lazy=name == "ours")
        accelerator, last = loop.accelerator, tmp_path / name / "last"
        accelerator.project_configuration.automatic_checkpoint_naming = False
        (last / "mine").mkdir(parents=True)
        last.chmod(0o700)
        (last / "precious").write_text("x")
        hook = accelerator.register_save_state_pre_hook(
            lambda *words: Path(words[2], "extra").write_text(words[2][-4:])
        )
        for safe in (True, False):
            assert accelerator.save_state(str(last), safe_serialization=safe) == last
        hook.remove()
        accelerator.save_state(last)
        accelerator.load_state(last)
        with pytest.raises((ValueError, TypeError)):
            accelerator.save_state()
        loop.end()
        assert last.stat().st_mode & 0o777 == 0o700
        trees.append({str(path.relative_to(last)) for path in last.rglob("*")})
        assert (last / "extra").read_text() == "last"
        assert {path.name for path in (tmp_path / name).iterdir()} == {"last"}
    assert trees[0] == trees[1]
    assert {"precious", "extra", "mine", "model.safetensors", "pytorch_model.bin"} <= trees[1]


def test_what_appears_in_a_folder_while_it_is_written_stays(training: ModuleType, tmp_path: Path) -> None:
    loop = training.Loop(tmp_path)
    loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    with held("sync"), looks.unwatched():  # as another process
        final = loop.accelerator.save_state(tmp_path / "here")
        (final / "inside").mkdir(parents=True)
        (final / "inside" / "precious").write_text("x")
        (final / "scheduler.bin").write_text("written later")
    loop.accelerator.end_training()
    assert (final / "inside" / "precious").read_text() == "x"
    assert (final / "scheduler.bin").read_text() == "written later"
    assert load_file(final / "model.safetensors").keys() == loop.net.state_dict().keys()
    assert list(tmp_path.iterdir()) == [final]


def test_what_cannot_be_merged_fails_without_loss(training: ModuleType, tmp_path: Path) -> None:
    loop = training.Loop(tmp_path)
    loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    (tmp_path / "file").write_text("x")
    with pytest.raises(CommitError, match="file is a file"):
        loop.accelerator.save_state(tmp_path / "file")
    with pytest.raises(CommitError):
        loop.checkpoints.close()
    (tmp_path / "folder" / "model.safetensors").mkdir(parents=True)
    (tmp_path / "folder" / "model.safetensors" / "precious").write_text("x")
    loop.accelerator.save_state(tmp_path / "folder")
    with pytest.raises(CommitError, match=r"model\.safetensors"):
        loop.accelerator.end_training()
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"file", "folder/model.safetensors/precious"}


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [3, 4, 5, 0, 1], [0, 1, 2, 0], [7, 7]])
def test_numbers_and_the_limit_are_those_of_accelerate(
    numbers: list[int], training: ModuleType, tmp_path: Path
) -> None:
    seen = []
    for name in ("stock", "ours"):
        loop = training.Loop(tmp_path / name, lazy=name == "ours", total_limit=3)
        refused = []
        for number in numbers:  # a loop that has loaded a state begins at 0 again
            loop.accelerator.project_configuration.iteration = number
            try:
                loop.accelerator.save_state()
            except ValueError as error:
                refused.append("already exists" in str(error))
        loop.end()
        seen.append((folders(tmp_path / name), refused, loop.accelerator.save_iteration))
    assert seen[0] == seen[1]


def test_what_it_cannot_do_is_refused(training: ModuleType, tmp_path: Path) -> None:
    loop = training.Loop(tmp_path, lazy=False)
    with pytest.raises(SettingsError, match="no_such"):
        training.attach(loop.accelerator, no_such=1)
    kinds = training.DistributedType
    whole = SimpleNamespace(state_dict_type=training.FullyShardedDataParallelPlugin(fsdp_version=1).state_dict_type)
    for kind, fsdp2, hint in (
        (kinds.DEEPSPEED, False, "datastates_ckpt"),
        (kinds.MEGATRON_LM, False, "megatron"),
        (kinds.XLA, False, "XLA is not supported"),
        (kinds.FSDP, False, "SHARDED_STATE_DICT"),
        (kinds.FSDP, True, "SHARDED_STATE_DICT"),
    ):
        refused = SimpleNamespace(
            distributed_type=kind,
            is_fsdp2=fsdp2,
            state=SimpleNamespace(fsdp_plugin=whole if kind == kinds.FSDP else None),
            save_state=None,
            project_configuration=SimpleNamespace(save_on_each_node=False),
        )
        with pytest.raises(ValueError, match=hint):
            training.attach(refused)
    training.attach(loop.accelerator)
    with pytest.raises(ValueError, match="has been called for it"):
        training.attach(loop.accelerator)


@pytest.mark.by_hand
@pytest.mark.parametrize("version", [1, 2], ids=["FSDP1", "FSDP2"])
def test_sharded_state_is_captured_while_training_goes_on(version: int, ranks: Any, tmp_path: Path) -> None:
    script = f"""
    import sys
    sys.path[:0] = {[str(HERE), str(HERE.parents[1] / "support")]!r}
    from pathlib import Path
    import torch
    from hold import GATE, held
    from training import Loop, os

    loop = Loop(Path({str(tmp_path)!r}), fsdp={version})
    loop.train(1)
    expected = loop.whole()
    with held("capture", until=GATE):
        final = loop.accelerator.save_state()
        loop.forward()
        (snapshots,) = loop.checkpoints.snapshots.values()
        assert len(snapshots) == 2 and not all(s.captured for s in snapshots), "forward or backward waited"
        loop.update()  # with FSDP2 it waits; FSDP of version 1 has made copies, so it does not
        assert {version} == 2 or not all(s.captured for s in snapshots), "the update waited"
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in loop.whole().items())
    loop.train(4)
    losses = loop.losses[1:]
    loop.resume(final)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loop.whole().items())
    loop.train(4)
    assert len(losses) == 3 and loop.losses == losses, (losses, loop.losses)
    loop.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)
    """
    ranks(2, script, timeout=150, imported=IMPORTED, ACCELERATE_USE_CPU="true")


def test_other_objects_of_the_program_find_it(training: ModuleType, tmp_path: Path) -> None:
    loop, folder = training.Loop(tmp_path), tmp_path / "one"
    loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    loop.train(2)
    with held("sync", until=(Transaction, "see")):
        loop.accelerator.save_state(folder)
        loop.accelerator.save({"a": 1}, folder / "more.pt")
    assert {"more.pt", "model.safetensors"} <= set(names(folder))
    with held("sync", until=(Transaction, "see")):
        loop.accelerator.save_state(tmp_path / "two")
        loop.accelerator.save_model(loop.net, tmp_path / "two")
    with held("sync", until=(Transaction, "see")):
        loop.accelerator.save_state(tmp_path / "three")
        other = training.Loop(tmp_path, lazy=False)
        other.accelerator.load_state(tmp_path / "three")
        assert other.step == 2
    loop.accelerator.end_training()


@pytest.mark.parametrize("limit", [1, 2, None])
def test_a_loop_that_saves_and_then_counts_finds_what_accelerate_keeps(
    limit: int | None, training: ModuleType, tmp_path: Path
) -> None:
    seen = []
    for name in ("stock", "ours"):
        loop = training.Loop(tmp_path / name, lazy=name == "ours", total_limit=limit)
        root = tmp_path / name / "checkpoints"
        with held("sync", until=(Transaction, "see")) if name == "ours" else contextlib.nullcontext():
            for number in range(2 if limit is None else 1):
                loop.accelerator.project_configuration.iteration = number
                loop.accelerator.save_state()
            found = [(root / "checkpoint_0").exists()]
        for number in range(2, 6):
            loop.accelerator.project_configuration.iteration = number
            loop.accelerator.save_state()
        found += [(root / f"checkpoint_{number}" / "optimizer.bin").exists() for number in range(6)]
        seen.append((found, names(root)))
        loop.accelerator.end_training()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("look", ["listdir", "rglob", "rmtree"])
def test_who_looks_at_the_project_sees_what_accelerate_leaves(look: str, training: ModuleType, tmp_path: Path) -> None:
    looking = {"listdir": os.listdir, "rglob": names, "rmtree": shutil.rmtree}[look]
    seen = []
    for name in ("stock", "ours"):
        loop = training.Loop(tmp_path / name, lazy=name == "ours")
        with held("sync", until=(Transaction, "see")) if name == "ours" else contextlib.nullcontext():
            loop.accelerator.save_state()
            seen.append(looking(tmp_path / name))
        loop.accelerator.end_training()
    assert seen[0] == seen[1]
