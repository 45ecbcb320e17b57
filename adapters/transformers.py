"""transformers: saves the checkpoints of a ``Trainer``, in its own files, while training goes on."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
import transformers
import transformers.modeling_utils
from pydantic import Field
from transformers import trainer_callback, trainer_utils
from typing_extensions import Unpack

from datastates._base import files, paths
from datastates.adapters.safetensors_redirect import redirected
from datastates.adapters.torch_files import FileOptions, FileSettings, TorchFiles, buffer_storages
from datastates.commit import manifest, retention
from datastates.ranks.together import settle
from datastates.ranks.world import World, world_of
from datastates.saving.snapshot import Snapshot

_log = logging.getLogger("datastates")
_OLD = "-old"
_PENDING = re.compile(rf"\.{trainer_utils.PREFIX_CHECKPOINT_DIR}-[0-9]+\Z")
_METHODS = ("_get_output_dir", "_load_best_model", "_save", "_save_checkpoint", "_save_rng_state", "_save_scaler")


_SAVE_FILE: dict[str, ModuleType] = {"safe_save_file": transformers.modeling_utils, "save_file": safetensors.torch}
"""Names by which a Trainer calls safetensors' ``save_file``, for models of transformers and for others."""


class TrainerSettings(FileSettings):
    """Settings of a Trainer's checkpoints: those of :class:`~datastates.adapters.torch_files.FileSettings`, and one."""

    rank_timeout: float = Field(
        600.0, gt=0, description="Seconds that a rank waits for the others to have written; then it names the missing."
    )


class TrainerOptions(FileOptions, total=False):
    """The fields of :class:`TrainerSettings` as keyword arguments, for type checkers."""

    rank_timeout: float


def attach(trainer: Any, **options: Unpack[TrainerOptions]) -> TrainerCheckpoints:
    """Let a Trainer save its checkpoints lazily. Nothing else about the Trainer changes.

    Checkpoints are the Trainer's usual folders.
    ``trainer.train(resume_from_checkpoint=True)`` and ``from_pretrained`` read them, with or without this package. A
    folder gets its name once everything in it is on stable storage. After that, ``save_total_limit`` deletes old ones.

    Args:
        trainer: A ``transformers.Trainer``, before ``train()``. On several ranks, all must attach.
        **options: Fields of :class:`TrainerSettings`.

    Returns:
        The checkpoints that the Trainer begins, with their snapshots.

    Raises:
        SettingsError: An option is unknown or its value is invalid; the message names it.
        ValueError: This Trainer saves in a way that is not supported, or ``attach()`` was called for it already; the
            message says which.
    """
    settings = TrainerSettings.of(options)
    paths.refuse_address(trainer.args.output_dir)
    unknown = [name for name in _METHODS if not hasattr(trainer, name)]
    unknown += [f"{module.__name__}.{name}" for name, module in _SAVE_FILE.items() if not hasattr(module, name)]
    args = trainer.args
    attached = isinstance(getattr(getattr(trainer, "_save_checkpoint", None), "__self__", None), TrainerCheckpoints)
    for refused, why in (
        (attached, "attach() has been called for it already"),
        (unknown, f"this version of transformers ({transformers.__version__}) has no {', '.join(unknown)}"),
        (trainer.is_deepspeed_enabled, 'with DeepSpeed, give its JSON file the entry "datastates_ckpt" instead'),
        (trainer.is_fsdp_enabled, "with FSDP the Trainer writes files of torch.distributed.checkpoint"),
        (getattr(trainer, "is_distributed_loading_by_transformers", False), "the model was sharded as it was loaded"),
        (
            not hasattr(trainer_utils, "rotate_checkpoints"),
            "this version of transformers deletes old ones in another way",
        ),
        (args.push_to_hub, "push_to_hub copies files before they are written"),
        (args.save_on_each_node and args.world_size > 1, "save_on_each_node: each node would have a folder of its own"),
    ):
        if refused:
            raise ValueError(f"{type(trainer).__name__} cannot save lazily: {why}")
    return TrainerCheckpoints(trainer, settings)


class _AtEnd(transformers.TrainerCallback):
    """Closes the checkpoints at the end of training."""

    def __init__(self, checkpoints: TrainerCheckpoints) -> None:
        self._checkpoints = checkpoints

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._checkpoints.close()


class TrainerCheckpoints:
    """The checkpoints that a Trainer has begun; :func:`attach` makes it. Used on the training thread."""

    def __init__(self, trainer: Any, settings: TrainerSettings) -> None:
        """Replace the methods with which the Trainer saves."""
        self.files = TorchFiles(settings)
        self.snapshots: dict[Path, list[Snapshot]] = {}
        """The last checkpoints that were begun: for each folder, the snapshots of this rank's large files."""
        self._trainer = trainer
        self._timeout = settings.rank_timeout
        self._world: World | None = None
        self._number = 0
        self._swept: set[Path] = set()
        self._begun: set[Path] = set()
        load_best = trainer._load_best_model

        def wait_and_load_best() -> None:
            self.files.wait()
            load_best()

        trainer._save_checkpoint, trainer._load_best_model = self._save, wait_and_load_best
        trainer.add_callback(_AtEnd(self))

    def wait(self) -> None:
        """Wait until every checkpoint has ended: it has its name, or has failed."""
        self.files.wait()

    def close(self) -> None:
        """Wait until every checkpoint has ended, then free threads and memory; the next one allocates them again.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        """
        try:
            self.files.close()
        finally:
            if self._world is not None:
                self._world.close()
            self._world = None

    def _save(self, model: Any, trial: Any) -> None:
        """Replaces ``Trainer._save_checkpoint``."""
        del model
        trainer, state = self._trainer, self._trainer.state
        name = f"trainer/{self._number}"
        self._number += 1  # before anything can fail: all ranks must count alike
        self.files.begin()
        root = Path(trainer._get_output_dir(trial=trial)).absolute()
        world = self._prepare(root)
        folder = _Folder(root / f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}", world.token(name))
        self._name_best(folder.final, trial)
        limit, kept = trainer.args.save_total_limit, state.best_model_checkpoint
        snapshots: list[Snapshot] = []
        spoiled: Exception | None = None
        try:
            folder.begin()
            self._write(folder.staged, trial, snapshots)
        except Exception as error:  # the other ranks must not wait for this one
            spoiled = error

        def publish(votes: dict[int, bytes]) -> bytes:
            del votes
            folder.publish()
            try:
                trainer_utils.rotate_checkpoints(str(root), limit, kept and str(Path(kept).absolute()), use_mtime=True)
            except OSError as error:  # this checkpoint stands nevertheless
                _log.warning("an old checkpoint could not be deleted: %s", error)
            return b""

        def end(failure: BaseException | None) -> None:
            try:
                failure = spoiled or failure or _synced(folder.staged)
                settle(world, f"{name}/end", failure, b"", publish)
            except Exception:
                self._begun.discard(folder.final)
                if world.rank == 0:
                    folder.discard()
                raise
            finally:
                folder.close()

        self._begun.add(folder.final)
        in_flight = {p: s for p, s in self.snapshots.items() if not all(x.ended for x in s)}
        self.snapshots = in_flight | {folder.final: snapshots}
        self.files.then(f"the checkpoint {folder.final}", snapshots, end)
        if spoiled is not None:
            raise spoiled

    def _prepare(self, root: Path) -> World:
        """The ranks that save together; rank 0 first removes what interrupted runs left in the output directory."""
        if self._world is None:
            self._world = world_of(None, None, root, self._timeout)
        if self._world.rank == 0 and root not in self._swept:
            self._swept.add(root)
            _sweep(root)
        return self._world

    def _name_best(self, final: Path, trial: Any) -> None:
        """Tell the Trainer the folder of the best model, as it does itself once that folder exists."""
        state = self._trainer.state
        if state.best_global_step:
            best = final.with_name(f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or best in self._begun or best.exists():
                state.best_model_checkpoint = os.path.join(self._trainer._get_output_dir(trial=trial), best.name)

    def _write(self, folder: Path, trial: Any, snapshots: list[Snapshot]) -> None:
        """Write the small files now, as the Trainer does, and begin to write the large ones."""
        trainer, args = self._trainer, self._trainer.args
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        if args.should_save:
            module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            if hasattr(module, "peft_config"):
                trainer.save_model(str(folder), _internal_call=True)  # PEFT adapters are small
            else:
                with redirected(_SAVE_FILE, folder, partial(self._write_tensors, snapshots, buffer_storages(module))):
                    trainer._save(str(folder))
        if not args.save_only_model:
            if args.should_save:
                optimizer = trainer.optimizer.state_dict()
                file = folder / "optimizer.pt"
                snapshots.append(self.files.write("optimizer", optimizer, file, _is_state))
                torch.save(trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")
            trainer._save_scaler(str(folder))
            trainer._save_rng_state(str(folder))
        if args.should_save:
            every = [*trainer.callback_handler.callbacks, trainer.control]
            saved: dict[str, Any] = {}
            for callback in (c for c in every if isinstance(c, trainer_callback.ExportableState)):
                saved.setdefault(type(callback).__name__, []).append(callback.state())
            trainer.state.stateful_callbacks |= {k: v if len(v) > 1 else v[0] for k, v in saved.items()}
            trainer.state.save_to_json(str(folder / "trainer_state.json"))

    def _write_tensors(
        self,
        snapshots: list[Snapshot],
        buffers: frozenset[int],
        tensors: Mapping[str, torch.Tensor],
        path: Path,
        metadata: Mapping[str, str],
    ) -> None:
        """Begin to write a file of the model's tensors; those in ``buffers`` are copied."""

        def is_parameter(_: str, tensor: torch.Tensor) -> bool:
            return tensor.untyped_storage().data_ptr() not in buffers

        snapshots.append(self.files.write_tensors(tensors, path, metadata, is_parameter))


class _Folder:
    """The folder of one checkpoint: filled under a name of its own, and published under the final one."""

    def __init__(self, final: Path, attempt: str) -> None:
        self.final = final
        self.staged = final.with_name(f".{final.name}.partial-{attempt}")
        self._attempt = attempt
        self._pending: manifest.Pending | None = None

    def begin(self) -> None:
        """Make the folder, with the lock that says that it is not abandoned."""
        self._pending = manifest.begin(self.final.with_name(f".{self.final.name}"), self._attempt)

    def publish(self) -> None:
        """Give it its final name, in the place of a folder that has it."""
        old = self.staged.with_name(self.staged.name + _OLD)
        if self.final.exists():
            os.rename(self.final, old)
        try:
            os.rename(self.staged, self.final)
        except OSError:
            _put_back(old, self.final)
            raise
        (self.final / manifest.LOCK).unlink()  # not earlier: a folder without a lock counts as abandoned
        files.sync_directory(self.final.parent)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self.staged, ignore_errors=True)

    def close(self) -> None:
        """Release the lock."""
        if self._pending is not None:
            self._pending.close()


def _sweep(root: Path) -> None:
    """Remove what interrupted runs left in a folder, and put back a checkpoint that one had moved aside."""
    try:
        for old in root.glob(f".{trainer_utils.PREFIX_CHECKPOINT_DIR}-*.partial-*{_OLD}"):
            replaced = root / old.name[1:].partition(".partial-")[0]
            if retention.is_live(old.with_name(old.name.removesuffix(_OLD))):
                continue  # another run is between two renames
            if not replaced.exists():
                _put_back(old, replaced)  # the run ended between two renames
                continue
            _log.warning("removing what an interrupted run left: %s", old)
            shutil.rmtree(old, ignore_errors=True)
        retention.sweep(root, _PENDING)
    except OSError as error:  # this rank must not fail for that, as the others go on
        _log.warning("what an interrupted run left could not be removed: %s", error)


def _put_back(old: Path, final: Path) -> None:
    if old.exists():
        os.rename(old, final)


def _is_state(key: str, _: torch.Tensor) -> bool:
    return key.startswith("state/")  # a scheduler changes the values in param_groups


def _synced(folder: Path) -> BaseException | None:
    """Put a folder and its files on stable storage; returns the error that prevented it, or None."""
    try:
        for path in (folder, *folder.rglob("*")):
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # a temporary file of another rank, which is still writing
                continue
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as error:
        return error
    return None
