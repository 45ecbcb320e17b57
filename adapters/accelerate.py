"""accelerate: ``save_state`` and ``load_state`` of an ``Accelerator``, in its own files, while training goes on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
from accelerate import checkpointing
from accelerate.utils import DistributedType, constants, other
from torch.distributed.fsdp import StateDictType
from typing_extensions import Unpack

from datastates.adapters.shared.folders import FolderCheckpoints, refuse_to_attach
from datastates.adapters.shared.guarded import guarded_of, is_optimizer_state
from datastates.adapters.shared.stand_ins import Function, having, standing_in
from datastates.adapters.shared.tried import warn_of_untried
from datastates.files.settings import FolderOptions, FolderSettings
from datastates.saving.snapshot import Snapshot
from datastates.storage import location

_SAVE_FILE: dict[str, ModuleType] = {"safe_save_file": other}
"""The name by which accelerate calls safetensors' ``save_file``."""
_ALONE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""The ways to train in which the main process saves the model."""
_ADVICE = {
    DistributedType.DEEPSPEED: 'give DeepSpeed\'s JSON file the entry "datastates_ckpt" instead',
    DistributedType.MEGATRON_LM: "use datastates.adapters.megatron in Megatron's own loop instead",
}


def attach(accelerator: Any, **options: Unpack[FolderOptions]) -> AcceleratorCheckpoints:
    """Let ``accelerator.save_state()`` save lazily. ``load_state()`` first waits for the saves that are under way.

    The folders are accelerate's own: ``load_state`` reads them with or without this package. A folder gets its name
    once everything in it is on stable storage. ``accelerator.end_training()`` waits for that.

    Args:
        accelerator: An ``accelerate.Accelerator``. On several ranks, all must attach.
        **options: Fields of :class:`~datastates.files.settings.FolderSettings`.

    Returns:
        The checkpoints that ``save_state`` begins, with their snapshots.

    Raises:
        SettingsError: An option is unknown or its value is invalid; the message names it.
        ValueError: The accelerator saves in a way that is not supported, or ``attach()`` was called for it already; the
            message says which.
    """
    warn_of_untried("accelerate")
    settings = FolderSettings.of(options)
    kind, plugin = accelerator.distributed_type, getattr(accelerator.state, "fsdp_plugin", None)
    fsdp = kind == DistributedType.FSDP
    each_node = accelerator.project_configuration.save_on_each_node and accelerator.num_processes > 1
    reasons = (
        (kind in _ADVICE, f"with {kind.value}, {_ADVICE.get(kind)}"),
        (not fsdp and kind not in _ALONE, f"{kind.value} is not supported"),
        (
            fsdp and plugin and plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT,
            "FSDP with whole state dicts is not supported: set state_dict_type='SHARDED_STATE_DICT'",
        ),
        (each_node, "save_on_each_node: each node would have a folder of its own"),
        (not hasattr(other, "safe_save_file"), f"this version of accelerate is not known: {accelerate.__version__}"),
    )
    refuse_to_attach(accelerator, "save_state", reasons)
    return AcceleratorCheckpoints(accelerator, settings)


class AcceleratorCheckpoints(FolderCheckpoints):
    """The checkpoints that an accelerator has begun; :func:`attach` makes it. Used on the training thread."""

    def __init__(self, accelerator: Any, settings: FolderSettings) -> None:
        """Replace the methods with which the accelerator saves, loads and ends."""
        super().__init__(settings, "accelerate")
        self._accelerator = accelerator
        self._stock_save = accelerator.save_state
        accelerator.save_state = self._save_state
        accelerator.load_state = self.waiting_before(accelerator.load_state)
        accelerator.end_training = self.closing_before(accelerator.end_training)

    def _save_state(self, output_dir: str | os.PathLike[str] | None = None, *words: Any, **options: Any) -> Path:
        """Replaces ``Accelerator.save_state``; returns the path that the folder will have."""
        accelerator = self._accelerator
        config = accelerator.project_configuration
        write, meets = partial(self._write, words, options), accelerator.distributed_type == DistributedType.FSDP
        if not config.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError("save_state: output_dir is missing, and automatic_checkpoint_naming is off")
            location.refuse_address(output_dir)
            self.save(Path(output_dir).absolute(), write, meets=meets)
            return Path(output_dir)
        project = Path(accelerator.project_dir)
        root = (project / "checkpoints").absolute()
        final, limit = root / f"checkpoint_{accelerator.save_iteration}", config.total_limit
        taken = self.has(final)
        if taken:
            self.wait()  # rotation, which accelerate does before it looks for the name, may take it away
            if final.exists() and final not in _beyond(root, limit):
                raise ValueError(f"{final} already exists. Set iteration of the project configuration to go on from")
        # not in the same folder: load_state takes any folder there for a checkpoint
        rotate = partial(_rotate, root, limit, final)
        self.save(final, write, retain=rotate, room=project.absolute(), replace=taken, meets=meets)
        return project / "checkpoints" / final.name

    def _write(self, words: Any, options: Any, folder: Path, snapshots: list[Snapshot]) -> None:
        """Write the small files now, as accelerate does, and begin to write the large ones."""
        accelerator = self._accelerator
        modules = [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
        optimizers = accelerator._optimizers
        is_lazy = guarded_of(modules, optimizers)

        def instead_of_save(stock: Function) -> Function:
            def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
                name = Path(f).name
                lazy = is_optimizer_state if name.startswith(constants.OPTIMIZER_NAME) else is_lazy
                large = name.startswith((constants.OPTIMIZER_NAME, constants.MODEL_NAME))
                if large and not safe_serialization:
                    if accelerator.is_main_process:
                        snapshots.append(self.files.write(name, obj, Path(f), lazy))
                else:
                    stock(obj, f, save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)

            return save

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.writing_tensors(_SAVE_FILE, folder, is_lazy, snapshots))
            stack.enter_context(standing_in(checkpointing, "save", instead_of_save))
            if accelerator.distributed_type == DistributedType.FSDP:
                stack.enter_context(self.sharded.writing_for(accelerator, folder, modules, optimizers, snapshots))
            # to the folder that it is given
            stack.enter_context(having(accelerator.project_configuration, "automatic_checkpoint_naming", False))
            self._stock_save(str(folder), *words, **options)


def _beyond(root: Path, limit: int | None, new: Path | None = None) -> list[Path]:
    """The oldest automatically named folders, which accelerate deletes to make room for a new one."""
    if limit is None:
        return []
    numbered = [(int(m[1]), path) for path in root.iterdir() if (m := re.fullmatch("checkpoint_([0-9]+)", path.name))]
    old = [path for _, path in sorted(numbered) if path != new]
    return old[: max(len(old) + 1 - limit, 0)]


def _rotate(root: Path, limit: int | None, new: Path) -> None:
    """Delete the folders that accelerate would have deleted before it saved a new one."""
    for path in _beyond(root, limit, new):
        shutil.rmtree(path)
