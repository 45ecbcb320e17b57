"""Whoever looks at a checkpoint as soon as the Trainer has saved it sees what the Trainer alone leaves there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from by_path import module_at
from hold import held

from datastates.files.transaction import Transaction

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # about loaders without pinned memory, and from transformers itself


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


def tree(root: Path) -> dict[str, object]:
    """The files below a folder that are not hidden, with what is in them. Times and paths differ between two runs."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_dir() or name.startswith("."):
            continue
        if path.name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            found[name] = str(torch.load(path, weights_only=False))
        else:
            found[name] = path.read_bytes() if path.name not in ("trainer_state.json", "training_args.bin") else None
    return found


class Look:
    """What a callback sees at each event, as a Trainer by itself and with this package shows it."""

    def __init__(self, training: ModuleType, folder: Path) -> None:
        self.training, self.folder = training, folder

    def run(self, make: Callable[..., Any] | None = None, *callbacks: Any, steps: int = 6, **options: Any) -> None:
        """Train both ways with the same seed, and compare."""
        training, seen = self.training, {}
        for name in ("stock", "ours"):
            found: list[object] = []
            root = self.folder / name
            trainer = training.trainer(root, steps, **{"save_steps": 2, **options})
            if make is not None:
                trainer = make(trainer)
            for callback in callbacks:
                trainer.add_callback(callback(found, root))
            if name == "ours":
                self.checkpoints = training.attach(trainer, **training.OPTIONS)
            training.transformers.set_seed(4)
            trainer.train()
            found.append(tree(root))
            best = trainer.state.best_model_checkpoint
            seen[name] = (found, best and os.path.relpath(best, root))
        assert seen["ours"] == seen["stock"]
        assert not list((self.folder / "ours").glob(".*"))


@pytest.fixture
def look(training: ModuleType, tmp_path: Path) -> Look:
    return Look(training, tmp_path)


def saving(training: ModuleType, act: Callable[[Path, Path, list[object]], None]) -> type:
    """A class of callbacks that do something with the checkpoint in ``on_save``."""

    class OnSave(training.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def __init__(self, found: list[object], root: Path) -> None:
            self.found, self.root = found, root

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            act(self.root, self.root / f"checkpoint-{state.global_step}", self.found)

    return OnSave


@pytest.mark.by_hand
def test_a_callback_sees_what_was_saved_and_what_it_writes_stays(
    look: Look, training: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def act(root: Path, checkpoint: Path, found: list[object]) -> None:
        found.append(tree(root))
        (checkpoint / "adapter").mkdir()
        (checkpoint / "adapter" / "weights.bin").write_bytes(b"x")
        (checkpoint / "config.json").write_text("{}")

    look.run(None, saving(training, act), save_total_limit=2)
    said = [line for line in caplog.messages if "OnSave has on_save" in line]
    assert said == ["waiting for checkpoint-2, and for later ones: the callback OnSave has on_save"]


def test_callbacks_that_come_with_transformers_wait_when_they_look() -> None:
    from transformers.integrations import integration_utils

    from datastates.adapters.transformers import looks_on_save

    for name in ("WandbCallback", "MLflowCallback", "DVCLiveCallback", "TensorBoardCallback", "ClearMLCallback"):
        kind = getattr(integration_utils, name)
        kind.__del__ = lambda self: None
        own = type(name, (kind,), {})
        assert not looks_on_save(own.__new__(own))
        mine = type(name, (kind,), {"on_save": lambda self, *_, **__: None})
        assert looks_on_save(mine.__new__(mine))


def overriding(training: ModuleType, name: str) -> Callable[[Any], Any]:
    """A Trainer of a class with one method of its own, which writes and looks as such classes do."""
    kind = training.transformers.Trainer

    def save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True)
        (folder / "before.txt").write_text("x")
        kind._save_checkpoint(self, model, trial)
        (folder / "after.txt").write_text(",".join(sorted(path.name for path in folder.iterdir())))

    def save(self: Any, output_dir: str | None = None, **options: Any) -> None:
        getattr(kind, name)(self, output_dir, **options)
        folder = Path(output_dir)  # type: ignore[arg-type]
        assert folder.name == f"checkpoint-{self.state.global_step}"
        (folder / f"{name}.txt").write_text(",".join(sorted(path.name for path in folder.iterdir())))
        beside = folder.parent / "projector"  # as LLaVA does
        beside.mkdir(exist_ok=True)
        (beside / f"{folder.name}.bin").write_bytes(b"x")

    method = save_checkpoint if name == "_save_checkpoint" else save
    return lambda made: _as(made, type("Mine", (kind,), {name: method}))


def _as(made: Any, kind: type) -> Any:
    made.__class__ = kind
    return made


BESTS = [(True, 1), (True, 2), (False, 2)]
OVERRIDDEN = ["save_model", "_save", "_save_optimizer_and_scheduler", "_save_rng_state"]


@pytest.mark.by_hand
@pytest.mark.parametrize(
    "name", ["_save_checkpoint", *(pytest.param(n, marks=pytest.mark.by_hand) for n in OVERRIDDEN)]
)
def test_a_subclass_saves_what_it_adds(
    name: str, look: Look, training: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    look.run(overriding(training, name), save_total_limit=1)
    assert sum(f"Mine has {name} of its own" in line for line in caplog.messages) == 1


@pytest.mark.by_hand
def test_a_method_that_is_replaced_in_one_trainer_is_called(look: Look, training: ModuleType) -> None:
    def make(trainer: Any) -> Any:
        stock = trainer._save_scaler

        def save(output_dir: str) -> None:
            stock(output_dir)
            Path(output_dir, "scaler.txt").write_text("x")

        trainer._save_scaler = save
        return trainer

    look.run(make)


@pytest.mark.by_hand
def test_a_model_that_looks_at_its_own_files_finds_them(look: Look, training: ModuleType) -> None:
    def make(trainer: Any) -> Any:
        stock = trainer.model.save_pretrained

        def save_pretrained(folder: str, **options: Any) -> None:
            stock(folder, **options)
            names = sorted(safetensors.load_file(Path(folder, "model.safetensors")))
            Path(folder, "names.txt").write_text(",".join(names))

        trainer.model.save_pretrained = save_pretrained
        return trainer

    look.run(make)


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("load", "limit"), [(False, 1), *(pytest.param(*each, marks=pytest.mark.by_hand) for each in BESTS)]
)
def test_the_best_and_the_newest_stay(load: bool, limit: int, look: Look, training: ModuleType) -> None:
    def make(trainer: Any) -> Any:
        scores = iter([2.0, 3.0, 1.0])
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *a, **k: {**evaluate(*a, **k), "eval_worse": next(scores)}
        return trainer

    look.run(
        make,
        save_total_limit=limit,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="worse",
        greater_is_better=True,
        load_best_model_at_end=load,
    )


@pytest.mark.by_hand
def test_a_checkpoint_that_something_else_asks_for_is_there(look: Look, training: ModuleType) -> None:
    class Ask(training.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        trainer: Any = None

        def __init__(self, found: list[object], root: Path) -> None:
            self.found, self.root = found, root

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                self.trainer._save_checkpoint(self.trainer.model, None)
                self.found.append(tree(self.root))

    def make(trainer: Any) -> Any:
        Ask.trainer = trainer
        return trainer

    look.run(make, Ask, steps=4)


@pytest.mark.long
def test_what_a_raising_run_has_saved_is_there(training: ModuleType, tmp_path: Path) -> None:
    class Stop(training.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("stopped")

    made = training.trainer(tmp_path, 4, save_steps=2)
    training.attach(made, **training.OPTIONS)
    made.add_callback(Stop())
    with pytest.raises(RuntimeError, match="stopped"):
        made.train()
    assert training.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    made.remove_callback(Stop)
    made.train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-4").exists()


@pytest.mark.by_hand
def test_a_callback_that_uploads_finds_all_files(look: Look, training: ModuleType) -> None:
    from transformers.integrations import integration_utils

    class Artifact:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.files: list[str] = []

        def add_dir(self, folder: str) -> None:  # as wandb does
            if not os.path.isdir(folder):
                raise ValueError("Path is not a directory")
            self.files = sorted(tree(Path(folder)))

    def make(found: list[object], root: Path) -> Any:
        class Uploading(integration_utils.WandbCallback):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self._log_model, self._initialized = integration_utils.WandbLogModel.CHECKPOINT, True
                run = SimpleNamespace(id="1", name="run", finish=lambda: None)

                def upload(artifact: Artifact, **_: Any) -> None:
                    found.append(artifact.files)

                self._wandb = SimpleNamespace(
                    summary={}, config={}, run=run, Artifact=Artifact, log_artifact=upload, log=lambda *_, **__: None
                )

            def setup(self, *_: Any, **__: Any) -> None:
                pass

            on_train_end = on_log = setup

        return Uploading()

    with held("sync", until=(Transaction, "see")):
        look.run(None, make)
