"""transformers: saves the checkpoints of a ``Trainer``, in its own files, while training goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
import transformers
import transformers.modeling_utils
import transformers.trainer
from torch.distributed.fsdp import StateDictType
from transformers import trainer_callback, trainer_utils
from transformers.integrations import integration_utils
from typing_extensions import Unpack

from datastates._base import log
from datastates.adapters.shared.folders import FolderCheckpoints, refuse_to_attach
from datastates.adapters.shared.guarded import guarded_of, is_optimizer_state
from datastates.adapters.shared.stand_ins import Function, instead_of, standing_in
from datastates.adapters.shared.tried import warn_of_untried
from datastates.files import in_flight
from datastates.files.settings import FolderOptions, FolderSettings
from datastates.saving.snapshot import Snapshot
from datastates.storage import location

_GIVEN_A_FOLDER = ("_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "save_model")
"""Methods that write a part of a checkpoint into the folder that they are given."""
_METHODS = (*_GIVEN_A_FOLDER, "_finalize_training", "_get_output_dir", "_maybe_log_save_evaluate", "_save_checkpoint")

_SAVE_FILE: dict[str, ModuleType] = {"safe_save_file": transformers.modeling_utils, "save_file": safetensors.torch}
"""Names by which a Trainer calls safetensors' ``save_file``, for models of transformers and for others."""


def attach(trainer: Any, **options: Unpack[FolderOptions]) -> TrainerCheckpoints:
    """Let a Trainer save its checkpoints lazily. Nothing else about the Trainer changes.

    Checkpoints are the Trainer's usual folders. ``trainer.train(resume_from_checkpoint=True)`` and ``from_pretrained``
    read them, with or without this package. A folder gets its name once everything in it is on stable storage. After
    that, ``save_total_limit`` deletes old ones.

    Args:
        trainer: A ``transformers.Trainer``, before ``train()``. On several ranks, all must attach.
        **options: Fields of :class:`~datastates.files.settings.FolderSettings`.

    Returns:
        The checkpoints that the Trainer begins, with their snapshots.

    Raises:
        SettingsError: An option is unknown or its value is invalid; the message names it.
        ValueError: This Trainer saves in a way that is not supported, or ``attach()`` was called for it already; the
            message says which.
    """
    warn_of_untried("transformers")
    settings = FolderSettings.of(options)
    location.refuse_address(trainer.args.output_dir)
    unknown = [name for name in _METHODS if not hasattr(trainer, name)]
    called = {**_SAVE_FILE, "rotate_checkpoints": trainer_utils}
    unknown += [f"{module.__name__}.{name}" for name, module in called.items() if not hasattr(module, name)]
    args, fsdp = trainer.args, trainer.is_fsdp_enabled
    reasons = (
        (unknown, f"this version of transformers ({transformers.__version__}) has no {', '.join(unknown)}"),
        (trainer.is_deepspeed_enabled, 'with DeepSpeed, give its JSON file the entry "datastates_ckpt" instead'),
        (
            fsdp and trainer.accelerator.state.fsdp_plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT,
            "FSDP with whole state dicts is not supported: set state_dict_type to SHARDED_STATE_DICT",
        ),
        (getattr(trainer, "is_distributed_loading_by_transformers", False), "the model was sharded as it was loaded"),
        (args.push_to_hub, "push_to_hub copies files before they are written"),
        (args.save_on_each_node and args.world_size > 1, "save_on_each_node: each node would have a folder of its own"),
    )
    refuse_to_attach(trainer, "_save_checkpoint", reasons)
    return TrainerCheckpoints(trainer, settings)


class _AtEnd(transformers.TrainerCallback):
    """Closes the checkpoints at the end of training."""

    def __init__(self, checkpoints: TrainerCheckpoints) -> None:
        self._checkpoints = checkpoints

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._checkpoints.close()


class TrainerCheckpoints(FolderCheckpoints):
    """The checkpoints that a Trainer has begun; :func:`attach` makes it. Used on the training thread."""

    def __init__(self, trainer: Any, settings: FolderSettings) -> None:
        """Replace the methods with which the Trainer trains and saves."""
        super().__init__(settings, "trainer")
        self._trainer = trainer
        self._stock_save = trainer._save_checkpoint
        trainer._save_checkpoint = self._save_checkpoint
        trainer._finalize_training = instead_of(self._finalize, trainer._finalize_training)
        trainer.train = instead_of(self._train, trainer.train)
        trainer.add_callback(_AtEnd(self))

    def _train(self, stock: Function, *words: Any, **options: Any) -> Any:
        """Replaces ``Trainer.train``, which looks for checkpoints first. Its caller may look once it has raised."""
        in_flight.wait_for_all()
        try:
            return stock(*words, **options)
        finally:
            self.wait()

    def _finalize(self, stock: Function, *words: Any, **options: Any) -> Any:
        """Replaces the end of ``train``, which may load the best checkpoint and delete others: waits for all first."""
        self.wait()
        state = self._trainer.state
        if state.best_model_checkpoint and not os.path.isdir(state.best_model_checkpoint):
            log.warning("the best checkpoint %s is not there: it is ignored", state.best_model_checkpoint)
            state.best_model_checkpoint = None  # it has failed
        return stock(*words, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Replaces ``Trainer._save_checkpoint``."""
        own = [name for name in _GIVEN_A_FOLDER if not is_stock(getattr(self._trainer, name))]
        if own:  # such a method may do anything with the folder that it is given, and with its path
            what = f"{self._name} has {', '.join(own)} of its own, so the Trainer writes into the folder itself"
            self.files.show(f"the checkpoint of step {self._trainer.state.global_step}", what)
            self._stock_save(model, trial)
            return
        if is_stock(self._stock_save):
            self._begin(trial, self._looks())
            return

        def instead_of_save(stock: Function) -> Function:
            def save(trainer: Any, model: Any, trial: Any) -> None:
                if trainer is self._trainer:
                    self._begin(trial, f"{self._name} has _save_checkpoint of its own")
                else:
                    stock(trainer, model, trial)

            return save

        with standing_in(transformers.Trainer, "_save_checkpoint", instead_of_save):
            self._stock_save(model, trial)

    @property
    def _name(self) -> str:
        return type(self._trainer).__name__

    def _looks(self) -> str | None:
        """Name the callback that may look at a checkpoint unnoticed once the Trainer has saved it, or None."""
        looking = [type(c).__name__ for c in self._trainer.callback_handler.callbacks if looks_on_save(c)]
        return f"the callback {looking[0]} has on_save" if looking else None

    def _begin(self, trial: Any, needed: str | None) -> None:
        """Save as ``Trainer._save_checkpoint`` does, lazily unless somebody needs it at once."""
        trainer, state = self._trainer, self._trainer.state
        root = Path(trainer._get_output_dir(trial=trial)).absolute()
        final = root / f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        limit, best = trainer.args.save_total_limit, None

        def write(folder: Path, snapshots: list[Snapshot]) -> None:
            nonlocal best
            self._name_best(final, trial)
            best = state.best_model_checkpoint and str(Path(state.best_model_checkpoint).absolute())
            self._write(trial, folder, snapshots)

        def rotate() -> None:
            trainer_utils.rotate_checkpoints(str(root), limit, best, use_mtime=True)

        self.save(final, write, needed=needed, retain=rotate, meets=trainer.is_fsdp_enabled)

    def _name_best(self, final: Path, trial: Any) -> None:
        """Tell the Trainer the folder of the best model, as it does itself once that folder exists."""
        state = self._trainer.state
        if state.best_global_step:
            best = final.with_name(f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or self.has(best):
                state.best_model_checkpoint = os.path.join(self._trainer._get_output_dir(trial=trial), best.name)

    def _write(self, trial: Any, folder: Path, snapshots: list[Snapshot]) -> None:
        """Let the Trainer write the small files, and begin to write the large ones."""
        trainer, args = self._trainer, self._trainer.args
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        with self._writing(folder, snapshots):
            trainer.save_model(str(folder), _internal_call=True)
            if not args.save_only_model:
                trainer._save_optimizer_and_scheduler(str(folder))
                trainer._save_scaler(str(folder))
                trainer._save_rng_state(str(folder))
        if args.should_save:
            every = [*trainer.callback_handler.callbacks, trainer.control]
            saved: dict[str, Any] = {}
            for callback in (c for c in every if isinstance(c, trainer_callback.ExportableState)):
                saved.setdefault(type(callback).__name__, []).append(callback.state())
            trainer.state.stateful_callbacks |= {k: v if len(v) > 1 else v[0] for k, v in saved.items()}
            trainer.state.save_to_json(str(folder / "trainer_state.json"))

    @contextlib.contextmanager
    def _writing(self, folder: Path, snapshots: list[Snapshot]) -> Iterator[None]:
        """A context in which the Trainer only begins to write its model and optimizer into a folder."""
        accelerator, optimizers = self._trainer.accelerator, [self._trainer.optimizer]
        module = accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        lazy = guarded_of([module], optimizers)
        optimizer = folder / transformers.trainer.OPTIMIZER_NAME

        def instead_of_save(stock: Function) -> Function:
            def save(obj: Any, f: Any, *words: Any, **options: Any) -> None:
                if isinstance(f, (str, Path)) and Path(f) == optimizer and not words and not options:
                    snapshots.append(self.files.write("optimizer", obj, optimizer, is_optimizer_state))
                else:
                    stock(obj, f, *words, **options)

            return save

        with contextlib.ExitStack() as stack:
            stack.enter_context(standing_in(torch, "save", instead_of_save))
            if is_stock(
                getattr(module, "save_pretrained", transformers.Trainer._save)
            ):  # another one may look at its files
                stack.enter_context(self.writing_tensors(_SAVE_FILE, folder, lazy, snapshots))
            if self._trainer.is_fsdp_enabled:
                stack.enter_context(self.sharded.writing_for(accelerator, folder, [module], optimizers, snapshots))
            yield


def is_stock(function: Any) -> bool:
    """Whether a method comes with transformers, as far as its code tells."""
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(transformers.__file__).parent)


def looks_on_save(callback: Any) -> bool:
    """Whether a callback may look at a checkpoint in ``on_save`` unnoticed, by other means than Python's functions.

    Callbacks that come with transformers look by Python's functions, if they look at all.
    """
    code = getattr(callback.on_save, "__code__", None)
    stock = (trainer_callback.__file__, integration_utils.__file__)
    return code is None or code.co_filename not in stock
