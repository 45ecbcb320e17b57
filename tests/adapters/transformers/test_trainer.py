"""Checkpoints of a Trainer: lazily captured, complete or absent, and fit for a Trainer without this package."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import short
from by_path import module_at
from hold import GATE, held

from datastates import _native
from datastates.commit.names import LOCK
from datastates.commit.pending import Pending, is_begun
from datastates.errors import SettingsError, StorageError
from datastates.files import looks
from datastates.storage import Location
from datastates.testing.provider_tests import difference

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # about loaders without pinned memory, and from transformers itself
IMPORTED = ("accelerate", "transformers.models.llama.modeling_llama", "transformers.trainer")


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


@pytest.fixture(scope="module")
def run(module_ranks: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Train for some steps in a process of its own."""

    def train(directory: Path, steps: int, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        options = {"timeout": 150, "may_fail": [0], "imported": IMPORTED, "alone": True}
        done: subprocess.CompletedProcess[str]
        (done,) = module_ranks(1, HERE / "training.py", directory, steps, *words, **options, **variables)
        return done

    return train


def said(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"from"')))


def same(first: Path, second: Path) -> bool:
    a, b = (torch.load(path, weights_only=True) for path in (first, second))
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def stock(run: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """The losses of an uninterrupted run without this package, and the file with its final state."""
    directory = tmp_path_factory.mktemp("stock")
    return said(run(directory / "whole", 12, "stock"))["losses"], directory / "whole-end.pt"


FAULTS = ["sync=kill@3", "write=kill@14", "store.sync_directory=kill@2"]


@pytest.mark.long
@pytest.mark.parametrize("fault", short.first(FAULTS, rest=pytest.mark.by_hand))
def test_killed_in_a_checkpoint_it_resumes_bit_for_bit(
    fault: str, run: Any, stock: tuple[list[float], Path], tmp_path: Path
) -> None:
    expected, end = stock
    killed = tmp_path / "killed"
    # one checkpoint at a time: the first has its name before the second begins, and the kill comes in the second
    done = run(killed, 12, DATASTATES_FAULTS=fault, MORE='{"max_in_flight": 1}')
    assert done.returncode == -signal.SIGKILL, done.stderr
    folders = {path.name for path in killed.iterdir() if not path.name.startswith(".")}
    resumed = said(run(killed, 12))
    # at the fault in sync_directory the second checkpoint already has its name
    assert resumed["from"] == ("checkpoint-10" if "directory" in fault else "checkpoint-5")
    assert folders == ({"checkpoint-5", "checkpoint-10"} if "directory" in fault else {"checkpoint-5"})
    assert resumed["losses"] == expected
    assert same(end, tmp_path / "killed-end.pt")
    assert {path.name for path in killed.iterdir()} == {"checkpoint-10", "checkpoint-12"}


@pytest.mark.long
def test_several_ranks_commit_one_folder(ranks: Any, tmp_path: Path) -> None:
    arguments = (HERE / "training.py", tmp_path / "run")
    options = {"timeout": 150, "imported": IMPORTED, "TOKENIZERS_PARALLELISM": "false"}
    (first, *_) = ranks(2, *arguments, 12, **options)
    expected = said(first)["losses"]
    folder = tmp_path / "run" / "checkpoint-10"
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} <= {
        path.name for path in folder.iterdir()
    }
    (tmp_path / "run-end.pt").rename(tmp_path / "whole-end.pt")
    (tmp_path / "run" / "checkpoint-12").rename(tmp_path / "last")
    (second, *_) = ranks(2, *arguments, 12, **options)
    assert said(second) == {"from": "checkpoint-10", "losses": expected}
    assert same(tmp_path / "whole-end.pt", tmp_path / "run-end.pt")


@pytest.mark.long
def test_sharded_state_is_the_trainers_and_resumes_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    options = {"timeout": 200, "imported": IMPORTED, "TOKENIZERS_PARALLELISM": "false"}
    runs: dict[str, Any] = {}
    for saves, loads in (("ours", "stock"), ("stock", "ours")):
        words = {"ours": ("fsdp2",), "stock": ("fsdp2", "stock")}
        arguments = (HERE / "training.py", tmp_path / saves, 12)
        (first, *_) = ranks(2, *arguments, *words[saves], **options)
        runs[saves] = said(first)["losses"]
        folder = tmp_path / saves / "checkpoint-10"
        inside = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".distcp"}
        runs[f"{saves} files"] = inside - {"config.json"}
        (tmp_path / f"{saves}-end.pt").rename(tmp_path / f"{saves}-whole.pt")
        (tmp_path / saves / "checkpoint-12").rename(tmp_path / f"{saves}-last")
        (second, *_) = ranks(2, *arguments, *words[loads], **options)
        assert said(second) == {"from": "checkpoint-10", "losses": runs[saves]}
        assert same(tmp_path / f"{saves}-whole.pt", tmp_path / f"{saves}-end.pt")
    assert "pytorch_model_fsdp_0/.metadata" in runs["ours files"]
    assert runs["ours"] == runs["stock"]
    assert runs["ours files"] == runs["stock files"]


@pytest.mark.long
def test_shards_of_fsdp1_are_those_that_the_trainer_saves(ranks: Any, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    options = {"timeout": 200, "imported": IMPORTED, "TOKENIZERS_PARALLELISM": "false"}
    for name, words in (("ours", ("fsdp1",)), ("stock", ("fsdp1", "stock"))):
        ranks(2, HERE / "training.py", tmp_path / name, 5, *words, **options)
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        found = []
        for name in ("ours", "stock"):
            dcp_to_torch_save(tmp_path / name / "checkpoint-5" / folder, tmp_path / f"{name}.pt")  # by torch's reader
            found.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
        assert difference(*found) is None
        ((kind, state),) = found[0].items()
        assert len(state["state"] if kind == "optimizer" else state) > 10


@pytest.mark.long
def test_what_fails_on_one_rank_fails_on_all(ranks: Any, tmp_path: Path) -> None:
    script = f"""
    import sys
    sys.path.insert(0, {str(HERE)!r})
    from pathlib import Path
    from datastates import DatastatesError, _native
    from training import OPTIONS, attach, os, trainer

    made = trainer(Path({str(tmp_path / "run")!r}), 6)
    attach(made, **OPTIONS)
    if os.environ["RANK"] == "0":
        _native.arm_fault("write", "fail", {errno.ENOSPC}, 1, 1)
    try:
        made.train()
    except DatastatesError as error:
        assert made.state.global_step == 6 and "No space" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    """
    ranks(2, script, timeout=150, imported=IMPORTED)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-6"}


def test_the_folders_are_those_of_the_trainer(training: ModuleType, tmp_path: Path) -> None:
    trained = {name: training.trainer(tmp_path / name, 7) for name in ("stock", "ours")}
    checkpoints = training.attach(trained["ours"], **training.OPTIONS)
    for made in trained.values():
        training.transformers.set_seed(4)
        made.train()
    ours, stock = (tmp_path / name / "checkpoint-5" for name in ("ours", "stock"))
    assert {path.name for path in ours.iterdir()} == {path.name for path in stock.iterdir()}
    assert (ours / "model.safetensors").read_bytes() == (stock / "model.safetensors").read_bytes()
    for name in ("config.json", "trainer_state.json"):
        first, second = (json.loads((folder / name).read_text()) for folder in (ours, stock))
        for entry in first.get("log_history", []) + second.get("log_history", []):
            entry.pop("train_runtime", None)
        assert first == second
    first, second = (torch.load(folder / "optimizer.pt", weights_only=True) for folder in (ours, stock))
    assert str(first) == str(second)
    assert checkpoints.files.failures == 0
    again = training.trainer(tmp_path / "stock", 7)  # without this package, from this package's folder
    training.transformers.set_seed(4)
    again.train(resume_from_checkpoint=str(ours))
    assert training.losses(again) == training.losses(trained["stock"])


@pytest.mark.long
def test_transformers_alone_reads_the_folder(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, 5)
    training.attach(made, **training.OPTIONS)
    made.train()
    tokens = torch.arange(16)[None]
    torch.save(made.model.eval()(tokens).logits, tmp_path / "logits.pt")
    script = f"""
import sys
sys.modules["datastates"] = None  # as if it were not installed
import torch, transformers
model = transformers.LlamaForCausalLM.from_pretrained({str(tmp_path / "checkpoint-5")!r}, use_safetensors=True)
assert torch.equal(model.eval()(torch.arange(16)[None]).logits, torch.load({str(tmp_path / "logits.pt")!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_folders_of_earlier_versions_are_resumed(training: ModuleType, tmp_path: Path) -> None:
    whole = training.trainer(tmp_path / "whole", 7)
    training.attach(whole, **training.OPTIONS)
    whole.train()
    folder = tmp_path / "whole" / "checkpoint-5"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    again = training.trainer(tmp_path / "again", 7)
    training.attach(again, **training.OPTIONS)
    again.train(resume_from_checkpoint=str(folder))
    assert training.losses(again) == training.losses(whole)


def kinds(training: ModuleType) -> dict[str, Callable[[], Any]]:
    """Models whose files are not simply their state dict."""

    class Sharded(training.transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def save_pretrained(self, *words: Any, **options: Any) -> None:
            super().save_pretrained(*words, max_shard_size="60KB", **options)

    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "tie_word_embeddings": False}
    return {
        "in several files": lambda: Sharded(training.transformers.LlamaConfig(**small, **heads)),
        "stored otherwise than it computes": lambda: training.transformers.MixtralForCausalLM(
            training.transformers.MixtralConfig(**small, **heads, **experts)
        ),
        "in half precision": lambda: Sharded(training.transformers.LlamaConfig(**small, **heads)).bfloat16(),
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", short.first(["in several files", "stored otherwise than it computes", "in half precision"])
)
def test_a_models_files_are_those_of_the_trainer(kind: str, training: ModuleType, tmp_path: Path) -> None:
    for name in ("stock", "ours"):
        training.transformers.set_seed(5)
        made = training.trainer(tmp_path / name, 2, kinds(training)[kind](), save_steps=2)
        if name == "ours":
            training.attach(made, **training.OPTIONS)
        training.transformers.set_seed(6)
        made.train()
    ours, stock = (tmp_path / name / "checkpoint-2" for name in ("ours", "stock"))
    files = {path.name for path in stock.glob("model*")}
    assert {path.name for path in ours.glob("model*")} == files
    assert ("model.safetensors.index.json" in files) == (kind != "stored otherwise than it computes")
    for name in files:
        assert (ours / name).read_bytes() == (stock / name).read_bytes(), name


@pytest.mark.long
def test_capture_goes_on_in_forward_and_backward_and_the_step_waits(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, training.EVERY + 2, save_strategy="steps")
    checkpoints = training.attach(made, **training.OPTIONS)
    captured: dict[int, list[bool]] = {}
    expected: dict[str, Any] = {}

    class Watch(training.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_save and not expected:
                expected.update({k: v.clone() for k, v in made.model.state_dict().items()})

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found = [snapshot.captured for each in checkpoints.snapshots.values() for snapshot in each]
            captured[state.global_step] = found

    made.add_callback(Watch())
    with held("capture", until=GATE):
        made.train()
    assert not all(captured[training.EVERY]), "forward or backward waited for the capture"
    assert len(captured[training.EVERY]) == 2
    weights = load_file(tmp_path / f"checkpoint-{training.EVERY}" / "model.safetensors")
    assert expected.keys() - weights.keys() == {"lm_head.weight"}, "only what is tied is left out"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


@pytest.mark.long
def test_parameters_that_no_optimizer_holds_are_copied(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, training.EVERY + 1, save_strategy="steps")
    made.optimizer = torch.optim.AdamW(made.model.parameters())
    made.model.codes = torch.nn.Parameter(torch.zeros(4096, 16))
    training.attach(made, **training.OPTIONS)

    class Write(training.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:  # as a library does it in a forward pass
            made.model.codes.data[1000:1010] += 1

    made.add_callback(Write())
    with held("capture", until=GATE):
        made.train()
    codes = load_file(tmp_path / f"checkpoint-{training.EVERY}" / "model.safetensors")["codes"]
    assert set(codes[1000:1010].unique().tolist()) == {training.EVERY}


@pytest.mark.long
def test_the_best_model_is_kept_and_loaded_at_the_end(training: ModuleType, tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    made = training.trainer(tmp_path, 6, metric_for_best_model="worse", greater_is_better=True, **best)
    training.attach(made, **training.OPTIONS)
    scores = iter([3.0, 2.0, 1.0])
    evaluate = made.evaluate
    made.evaluate = lambda *a, **k: {**evaluate(*a, **k), "eval_worse": next(scores)}
    made.train()
    assert Path(made.state.best_model_checkpoint).name == "checkpoint-2"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-6"}
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(made.model.state_dict()[name], tensor) for name, tensor in weights.items())


@pytest.mark.long
def test_a_failure_is_told_and_leaves_nothing(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, 6)
    training.attach(made, **training.OPTIONS)
    _native.arm_fault("write", "fail", errno.ENOSPC, 1, 1)
    with pytest.raises(StorageError, match="No space"):
        made.train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-6"}


def test_what_another_run_is_writing_is_left_alone(training: ModuleType, tmp_path: Path) -> None:
    alive, dead = (Pending(tmp_path / f".checkpoint-{step}").begin() for step in (77, 78))
    dead.close()
    for pending in (alive, dead):  # as between the two renames that replace a checkpoint
        for folder in ("old", "."):
            (pending.directory / folder / pending.directory.name[1:14]).mkdir(parents=True)
    made = training.trainer(tmp_path, 5)
    checkpoints = training.attach(made, **training.OPTIONS)
    found: list[bool] = []

    class Watch(training.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            checkpoints.files.begin()
            checkpoints.files.put(checkpoints.files.transaction("what comes before", lambda _: go.wait()))

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            with looks.unwatched():
                found.extend(is_begun(Location(path)) for path in tmp_path.glob(".checkpoint-5.partial-*"))
            go.set()

    go = threading.Event()
    made.add_callback(Watch())
    made.train()
    assert found == [True]
    names = {"checkpoint-5", "checkpoint-78", alive.directory.name}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert not (tmp_path / "checkpoint-5" / LOCK).exists()
    alive.abandon()


def test_a_trainer_is_attached_once(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, 5)
    training.attach(made, **training.OPTIONS)
    with pytest.raises(ValueError, match="has been called for it"):
        training.attach(made, **training.OPTIONS)


def test_a_module_that_is_no_model_of_transformers(training: ModuleType, tmp_path: Path) -> None:
    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Embedding(64, 8)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, input_ids: Any, labels: Any) -> Any:
            self.seen += 1
            return {"loss": self.net(input_ids).square().mean()}

    made = training.trainer(tmp_path, 5, Net())
    training.attach(made, **training.OPTIONS)
    made.train()
    weights = load_file(tmp_path / "checkpoint-5" / "model.safetensors")
    assert weights["seen"].tolist() == [5.0] * 3
    assert torch.equal(weights["net.weight"], made.model.net.weight)


def test_what_it_cannot_do_is_refused(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, 5)
    with pytest.raises(SettingsError, match="no_such"):
        training.attach(made, no_such=1)
    whole = training.FullyShardedDataParallelPlugin(fsdp_version=1).state_dict_type
    for name, version, hint in (
        ("is_deepspeed_enabled", 2, "datastates_ckpt"),
        ("is_fsdp_enabled", 1, "SHARDED_STATE_DICT"),
        ("is_fsdp_enabled", 2, "SHARDED_STATE_DICT"),
    ):
        refused = training.trainer(tmp_path, 5)
        plugin = SimpleNamespace(state_dict_type=whole)
        refused.accelerator = SimpleNamespace(is_fsdp2=version == 2, state=SimpleNamespace(fsdp_plugin=plugin))
        setattr(refused, name, True)
        with pytest.raises(ValueError, match=hint):
            training.attach(refused)
    refused = training.trainer(tmp_path, 5)
    refused.args = SimpleNamespace(**{**vars(refused.args), "push_to_hub": True, "world_size": 1})
    with pytest.raises(ValueError, match="push_to_hub"):
        training.attach(refused)
