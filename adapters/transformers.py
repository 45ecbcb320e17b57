"""transformers: saves the checkpoints of a ``Trainer``, in its own files, while training goes on."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
import transformers
import transformers.modeling_utils
from torch.distributed.fsdp import StateDictType
from transformers import trainer_callback, trainer_utils
from typing_extensions import Unpack

from datastates._base import paths
from datastates.adapters.folders import FolderCheckpoints, FolderOptions, FolderSettings, refuse_to_attach
from datastates.adapters.torch_files import is_optimizer_state
from datastates.saving.snapshot import Snapshot

_METHODS = (
    "_get_output_dir",
    "_load_best_model",
    "_save",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_save_scaler",
)

_SAVE_FILE: dict[str, ModuleType] = {"safe_save_file": transformers.modeling_utils, "save_file": safetensors.torch}
"""Names by which a Trainer calls safetensors' ``save_file``, for models of transformers and for others."""


def attach(trainer: Any, **options: Unpack[FolderOptions]) -> TrainerCheckpoints:
    """Let a Trainer save its checkpoints lazily. Nothing else about the Trainer changes.

    Checkpoints are the Trainer's usual folders. ``trainer.train(resume_from_checkpoint=True)`` and ``from_pretrained``
    read them, with or without this package. A folder gets its name once everything in it is on stable storage. After
    that, ``save_total_limit`` deletes old ones.

    Args:
        trainer: A ``transformers.Trainer``, before ``train()``. On several ranks, all must attach.
        **options: Fields of :class:`~datastates.adapters.folders.FolderSettings`.

    Returns:
        The checkpoints that the Trainer begins, with their snapshots.

    Raises:
        SettingsError: An option is unknown or its value is invalid; the message names it.
        ValueError: This Trainer saves in a way that is not supported, or ``attach()`` was called for it already; the
            message says which.
    """
    settings = FolderSettings.of(options)
    paths.refuse_address(trainer.args.output_dir)
    unknown = [name for name in _METHODS if not hasattr(trainer, name)]
    unknown += [f"{module.__name__}.{name}" for name, module in _SAVE_FILE.items() if not hasattr(module, name)]
    args, fsdp = trainer.args, trainer.is_fsdp_enabled
    reasons = (
        (unknown, f"this version of transformers ({transformers.__version__}) has no {', '.join(unknown)}"),
        (trainer.is_deepspeed_enabled, 'with DeepSpeed, give its JSON file the entry "datastates_ckpt" instead'),
        (
            fsdp and trainer.accelerator.state.fsdp_plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT,
            "FSDP with whole state dicts is not supported: set state_dict_type to SHARDED_STATE_DICT",
        ),
        (getattr(trainer, "is_distributed_loading_by_transformers", False), "the model was sharded as it was loaded"),
        (
            not hasattr(trainer_utils, "rotate_checkpoints"),
            "this version of transformers deletes old ones in another way",
        ),
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
        """Replace the methods with which the Trainer saves."""
        super().__init__(settings, "trainer")
        self._trainer = trainer
        trainer._save_checkpoint = self._save_checkpoint
        trainer._load_best_model = self.waiting_before(trainer._load_best_model)
        trainer.add_callback(_AtEnd(self))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Replaces ``Trainer._save_checkpoint``."""
        del model
        trainer, state = self._trainer, self._trainer.state
        root = Path(trainer._get_output_dir(trial=trial)).absolute()
        final = root / f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        limit, best = trainer.args.save_total_limit, None

        def write(folder: Path, snapshots: list[Snapshot]) -> None:
            nonlocal best
            self._name_best(final, trial)
            best = state.best_model_checkpoint and str(Path(state.best_model_checkpoint).absolute())
            self._write(trial, folder, snapshots)

        self.save(final, write, retain=lambda: trainer_utils.rotate_checkpoints(str(root), limit, best, use_mtime=True))

    def _name_best(self, final: Path, trial: Any) -> None:
        """Tell the Trainer the folder of the best model, as it does itself once that folder exists."""
        state = self._trainer.state
        if state.best_global_step:
            best = final.with_name(f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or self.has(best):
                state.best_model_checkpoint = os.path.join(self._trainer._get_output_dir(trial=trial), best.name)

    def _write(self, trial: Any, folder: Path, snapshots: list[Snapshot]) -> None:
        """Write the small files now, as the Trainer does, and begin to write the large ones."""
        trainer, args = self._trainer, self._trainer.args
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        if trainer.is_fsdp_enabled:
            with self.sharded.writing_for(trainer.accelerator, folder, [module], snapshots):
                trainer._save_optimizer_and_scheduler(str(folder))  # and the model
        elif args.should_save:
            if hasattr(module, "peft_config"):
                trainer.save_model(str(folder), _internal_call=True)  # PEFT adapters are small
            else:
                with self.writing_tensors(_SAVE_FILE, folder, [module], snapshots):
                    trainer._save(str(folder))
        if not args.save_only_model:
            if args.should_save and not trainer.is_fsdp_enabled:
                optimizer = trainer.optimizer.state_dict()
                file = folder / "optimizer.pt"
                snapshots.append(self.files.write("optimizer", optimizer, file, is_optimizer_state))
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
