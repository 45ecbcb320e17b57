"""Whoever looks at a checkpoint as soon as Lightning has saved it sees what Lightning alone leaves there."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hold import held

from datastates.files import looks
from datastates.files.transaction import Transaction

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")


def tree(root: Path) -> dict[str, object]:
    """The files and links in a folder, with the step of each checkpoint."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")) if root.exists() else ():
        if path.is_file() and not path.name.startswith("."):
            step = torch.load(path, weights_only=True)["global_step"]
            found[str(path.relative_to(root))] = (step, os.readlink(path) if path.is_symlink() else None)
    return found


class Fit:
    """Fits with Lightning's own plugin and with this package's, and compares what each event shows."""

    def __init__(self, training: ModuleType, io: Any, folder: Path) -> None:
        self.training, self.io, self.folder = training, io, folder

    def __call__(self, *saving: dict[str, Any], steps: int = 4, act: Any = None, **options: Any) -> Any:
        from lightning.pytorch.callbacks import Callback, ModelCheckpoint

        seen = []
        for name, io in (("stock", None), ("ours", self.io)):
            root, found = self.folder / name, []
            made = [each.pop("kind", ModelCheckpoint)(dirpath=root, **each) for each in map(dict, saving)]

            class Look(Callback):  # type: ignore[misc]
                root_, found_ = root, found

                def on_train_start(self, trainer: Any, module: Any) -> None:
                    self.saves = 0

                def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                    if act is not None:
                        act(trainer, self.root_, self.found_)

                def on_train_end(self, trainer: Any, module: Any) -> None:
                    self.found_.append(tree(self.root_))

            self.training.quiet()
            trainer = self.training.pl.Trainer(
                max_steps=steps,
                accelerator="cpu",
                enable_progress_bar=False,
                enable_model_summary=False,
                plugins=[] if io is None else [io],
                callbacks=[Look(), *made],
                **{"logger": False, **{k: v(found, root) if callable(v) else v for k, v in options.items()}},
            )
            trainer.fit(self.training.Module(), self.training.data())
            found.append(tree(root))
            found.append([os.path.basename(callback.best_model_path) for callback in made])
            seen.append(found)
        assert seen[0] == seen[1]
        return seen[1]


@pytest.fixture
def fit(training: ModuleType, io: Any, tmp_path: Path) -> Fit:
    return Fit(training, io, tmp_path)


EVERY = {"every_n_train_steps": 1, "save_top_k": -1}


def test_names_that_are_taken_get_versions(fit: Fit) -> None:
    other = {"filename": "model", **EVERY, "every_n_train_steps": 2, "save_last": True}
    seen = fit({"filename": "model", **EVERY, "save_last": True}, other)
    assert {"model.ckpt", "model-v1.ckpt", "last.ckpt", "last-v1.ckpt"} <= seen[-2].keys()


@pytest.mark.parametrize("top", [-1, 1])
def test_a_link_leads_to_a_file(fit: Fit, top: int) -> None:
    def act(trainer: Any, root: Path, found: list[object]) -> None:
        with looks.unwatched():  # as after a crash
            link = root / "last.ckpt"
            found.append((link.is_symlink(), link.exists()))
        found.append(tree(root))

    seen = fit({"filename": "{step}", "every_n_train_steps": 2, "save_top_k": top, "save_last": "link"}, act=act)
    assert "last.ckpt" in seen[-2]


def test_a_save_by_the_program_is_there(fit: Fit) -> None:
    def act(trainer: Any, root: Path, found: list[object]) -> None:
        trainer.save_checkpoint(root / f"mine-{trainer.global_step}.ckpt")
        found.append(tree(root))

    fit(act=act, steps=2)


def test_a_callback_of_its_own_kind_finds_its_file(fit: Fit) -> None:
    import shutil

    from lightning.pytorch.callbacks import ModelCheckpoint

    class Copying(ModelCheckpoint):  # type: ignore[misc]
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            shutil.copy(filepath, filepath + ".copy")

    fit({"kind": Copying, "filename": "{step}", **EVERY})


def test_a_logger_finds_what_it_uploads(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def make(found: list[object], root: Path) -> Any:
        class Uploading(CSVLogger):  # type: ignore[misc]
            def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
                found.append(torch.load(checkpoint_callback.best_model_path, weights_only=True)["global_step"])

        return Uploading(root.parent / f"{root.name}-logs")

    seen = fit({"filename": "{step}", **EVERY}, logger=make)
    assert seen[:4] == [1, 2, 3, 4]
    assert sum("Uploading has after_save_checkpoint" in line for line in caplog.messages) == 1


def test_a_logger_of_lightnings_own_finds_what_it_uploads(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

    def make(found: list[object], root: Path) -> Any:
        class Experiment:
            def log_artifact(self, run: Any, path: str, *_: Any) -> None:
                found.append((os.path.basename(path), torch.load(path, weights_only=True)["global_step"]))

            def log_artifacts(self, run: Any, *_: Any) -> None:
                pass

        class Stub(CSVLogger):  # type: ignore[misc]
            experiment, after_save_checkpoint = Experiment(), MLFlowLogger.after_save_checkpoint
            _scan_and_log_checkpoints = MLFlowLogger._scan_and_log_checkpoints
            _log_model, _run_id, _logged_model_time = "all", "run", {}

            def log_metrics(self, *_: Any, **__: Any) -> None:
                pass

            log_hyperparams = save = finalize = log_metrics

        return Stub(root.parent / f"{root.name}-logs")

    seen = fit({"filename": "{step}", **EVERY, "save_last": True}, logger=make)
    assert ("last.ckpt", 4) in seen
    assert not [line for line in caplog.messages if "after_save_checkpoint" in line]


def test_a_fit_that_nobody_looks_at_does_not_wait(
    training: ModuleType, io: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there: list[bool] = []

    class Look(training.pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == training.BATCHES:
                with looks.unwatched():
                    there.append(bool(list(tmp_path.glob("*.ckpt"))))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            there.append(bool(list(tmp_path.glob("*.ckpt"))))

    training.quiet()
    with held("sync", until=(Transaction, "see")):
        training.trainer(tmp_path, training.BATCHES + 1, io, Look()).fit(training.Module(), training.data())
    assert there == [False, True]
    assert not [line for line in caplog.messages if "waiting for" in line]


@pytest.mark.by_hand
@pytest.mark.parametrize("last", ["link", pytest.param(True, marks=pytest.mark.by_hand)])
def test_what_is_tested_and_resumed_after_a_fit_is_that_of_lightning(
    last: Any, training: ModuleType, io: Any, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(training.Module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            self.log("score", float((self.global_step * 3) % 5))
            return loss

        def test_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean())

    seen = []
    for name in ("stock", "ours"):
        root = tmp_path / name
        found: list[object] = []

        def make(steps: int, root: Path = root, name: str = name) -> Any:
            options = {"dirpath": root, "filename": "{step}", "every_n_train_steps": 1, "save_top_k": 2}
            saving = ModelCheckpoint(**options, monitor="score", save_last=last)
            return training.pl.Trainer(
                max_steps=steps,
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                plugins=[io] if name == "ours" else [],
                callbacks=[saving],
            )

        training.quiet()
        trainer = make(6)
        trainer.fit(Module(), training.data())
        for which in ("best", "last"):
            found.append(trainer.test(ckpt_path=which, dataloaders=training.data(), verbose=False))
            path = getattr(trainer.checkpoint_callback, f"{which}_model_path")
            found.append((os.path.relpath(path, root), str(Module.load_from_checkpoint(path).state_dict())))
        found.append(tree(root))
        training.quiet()
        make(8).fit(module := Module(), training.data(), ckpt_path="last")
        found.append((tree(root), module.losses))
        seen.append(found)
    assert seen[0] == seen[1]


def test_fabric_finds_what_it_saves(training: ModuleType, io: Any, tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    fabric.save(tmp_path / "state.ckpt", {"model": (model := torch.nn.Linear(512, 512)), "step": 3})
    assert torch.load(tmp_path / "state.ckpt", weights_only=True)["step"] == 3
    state = {"model": (other := torch.nn.Linear(512, 512)), "step": 0}
    fabric.load(tmp_path / "state.ckpt", state)
    assert state["step"] == 3
    assert torch.equal(model.weight, other.weight)


def test_what_is_removed_when_nothing_is_under_way_is_gone_at_once(io: Any, tmp_path: Path) -> None:
    io.save_checkpoint({"state_dict": {"w": torch.ones(8)}}, tmp_path / "a.ckpt")
    io.files.wait()
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []
