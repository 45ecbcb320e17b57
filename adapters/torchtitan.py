"""torchtitan: a checkpoint manager that saves lazily, and an override that puts it in the place of torchtitan's own.

Written for ``BaseCheckpointManager`` of torchtitan 0.3.0. It writes checkpoints like torchtitan's own manager,
``step-N`` with ``.metadata`` in it, and each manager loads the other's.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.override import derive, override

from datastates.adapters.dcp import DataStatesStorageReader, DataStatesStorageWriter, async_save
from datastates.adapters.shared.tried import warn_of_untried
from datastates.saving.snapshot import Snapshot, wait_free


class DataStatesCheckpointManager(BaseCheckpointManager):
    """Captures while the next forward and backward passes run, and writes while training goes on.

    Give its ``Config`` as the ``checkpoint`` of the trainer's configuration, or name :func:`lazy_checkpoints` among the
    configuration's overrides. Only torchtitan's own manager makes two kinds of checkpoints: checkpoints in Hugging
    Face's format, and seed checkpoints.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's settings of checkpoints, and one more.

        Attributes:
            host_cache: Host memory that checkpoints stream through, such as ``"8GiB"``; see
                :class:`~datastates.config.IoSettings`.
        """

        host_cache: str = "auto"

        def __post_init__(self) -> None:
            """Raise for settings that this manager does not support."""
            BaseCheckpointManager.Config.__post_init__(self)
            if self.initial_load_in_hf or self.last_save_in_hf:
                raise ValueError("checkpoints in Hugging Face's format are for torchtitan's own manager")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Prepare to save and to load; ``build()`` of the configuration calls this.

        Args:
            config: The settings.
            dataloader: The trainer's data loader.
            model_parts: The models of this rank, one for each stage of a pipeline.
            optimizers: The trainer's container of optimizers.
            lr_schedulers: The trainer's container of schedulers.
            states: Other objects to save, by name.
            sd_adapter: Not used.
            base_folder: The folder that holds ``config.folder``.
        """
        del sd_adapter
        self.enable = config.enable
        if not self.enable:
            return
        warn_of_untried("torchtitan")
        self.config = config
        self.folder = Path(base_folder, config.folder).absolute()
        self.save_future: Snapshot | None = None
        """The save that is under way."""
        self.states = {**states, OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers}
        self.model = ModelWrapper(model_parts)
        # one for all checkpoints: it keeps plans, threads and pinned memory
        self.writer = DataStatesStorageWriter(self.folder, host_cache=config.host_cache)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        self.maybe_wait_for_saving()
        if last_step and config.last_save_model_only:
            dtype = TORCH_DTYPE_MAP[config.export_dtype]
            model = self.model.state_dict()
            state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in model.items()}
        else:
            state = {**self.states, **self.model.state_dict()}
        self.save_future = async_save(state, self._path(curr_step), storage_writer=self.writer, step=curr_step)
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _maybe_wait_for_staging(self) -> None:
        # torch's optimizers wait for the capture by themselves; a failure is told where the save is waited for
        if self.save_future is not None:
            wait_free(self.save_future)

    def _wait_for_saving(self) -> None:
        saved, self.save_future = self.save_future, None
        assert saved is not None
        saved.wait_committed()
        if self.config.keep_latest_k and dist.get_rank() == 0:
            for step in self._steps()[: -self.config.keep_latest_k]:
                (self._path(step) / ".metadata").unlink()  # it is no checkpoint from here on
                shutil.rmtree(self._path(step), ignore_errors=True)

    def _load(self, step: int = -1) -> bool:
        self.maybe_wait_for_saving()
        steps = self._steps()
        if step != -1 and step not in steps:
            raise FileNotFoundError(f"there is no checkpoint of step {step} in {self.folder}")
        if not steps:
            path, model_only = self.config.initial_load_path, self.config.initial_load_model_only
            if not path:
                return False
        else:
            step = steps[-1] if step == -1 else step
            path, model_only = str(self._path(step)), step == 0
        excluded = self.config.exclude_from_loading
        if unknown := set(excluded) - set(self.states):
            raise ValueError(f"exclude_from_loading: there is no {', '.join(sorted(unknown))}")
        state = self.model.state_dict().copy()
        if not model_only:
            state |= {name: value for name, value in self.states.items() if name not in excluded}
        load(state, storage_reader=DataStatesStorageReader(path))
        self.model.load_state_dict(state)
        return True

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            self.writer.close()

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _steps(self) -> list[int]:
        names = [path.parent.name for path in self.folder.glob("step-*/.metadata")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-[0-9]+", name))


@override(target=CheckpointManager.Config, description="datastates: lazy checkpoints")  # type: ignore[untyped-decorator]
def lazy_checkpoints(config: Any, *, host_cache: str = "auto") -> DataStatesCheckpointManager.Config:
    """The override that torchtitan's configuration names: ``datastates.adapters.torchtitan.lazy_checkpoints``.

    All settings of the trainer's checkpoints stay, except ``async_mode``: saves are always asynchronous.

    Args:
        config: The configuration of torchtitan's own manager.
        host_cache: As in :class:`DataStatesCheckpointManager.Config`.
    """
    return derive(config, DataStatesCheckpointManager.Config, host_cache=host_cache)  # type: ignore[no-any-return]
