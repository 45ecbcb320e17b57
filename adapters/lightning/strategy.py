"""Lightning's ``ModelParallelStrategy`` and ``FSDPStrategy``: sharded checkpoints, written while training goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from typing_extensions import Unpack

from datastates.adapters.lightning import asking
from datastates.adapters.shared.folders import FolderCheckpoints, refuse_to_attach
from datastates.adapters.shared.tried import warn_of_untried
from datastates.files.settings import FolderOptions, FolderSettings
from datastates.saving.snapshot import Snapshot
from datastates.storage import location

_METHODS = ("save_checkpoint", "remove_checkpoint")
_STATE_DICTS = ("optimizer_state", "lightning_module_state_dict")
_ON_DEVICE = StateDictOptions(full_state_dict=False, cpu_offload=False)


def attach(strategy: Any, **options: Unpack[FolderOptions]) -> StrategyCheckpoints:
    """Let a ``ModelParallelStrategy`` or an ``FSDPStrategy`` save its sharded checkpoints lazily.

    Checkpoints are Lightning's folders, which it reads with or without this package. A folder gets its name once
    everything in it is on stable storage. ``fit`` ends once all folders have their names.

    Args:
        strategy: The strategy, before it is given to the ``Trainer``. On several ranks, all must attach.
        **options: Fields of :class:`~datastates.files.settings.FolderSettings`.

    Returns:
        The checkpoints that the strategy begins, with their snapshots.

    Raises:
        SettingsError: An option is unknown or its value is invalid; the message names it.
        ValueError: The strategy saves in a way that is not supported, or ``attach()`` was called for it already; the
            message says which.
    """
    warn_of_untried("lightning")
    settings = FolderSettings.of(options)
    known = [base.__name__ for base in type(strategy).__mro__]
    fsdp1 = "FSDPStrategy" in known
    reasons = (
        (fsdp1 and getattr(strategy, "_state_dict_type", None) != "sharded", 'set state_dict_type="sharded"'),
        (
            not fsdp1 and "ModelParallelStrategy" not in known,
            "give DataStatesCheckpointIO to the Trainer's plugins instead",
        ),
        (
            not fsdp1 and not getattr(strategy, "_save_distributed_checkpoint", False),
            "set save_distributed_checkpoint=True",
        ),
    )
    refuse_to_attach(strategy, "save_checkpoint", reasons)
    return StrategyCheckpoints(strategy, settings, fsdp1=fsdp1)


class StrategyCheckpoints(FolderCheckpoints):
    """The checkpoints that a strategy has begun; :func:`attach` makes it. Used on the training thread."""

    def __init__(self, strategy: Any, settings: FolderSettings, *, fsdp1: bool) -> None:
        """Replace the methods with which the strategy saves, loads and removes.

        Args:
            strategy: The strategy.
            settings: The settings.
            fsdp1: Whether it shards by FSDP of version 1, whose state dicts are copies: the strategy makes them itself.
        """
        super().__init__(settings, "lightning")
        self._strategy = strategy
        self._fsdp1 = fsdp1
        self._stock_save = strategy.save_checkpoint
        strategy.load_checkpoint = self.waiting_before(strategy.load_checkpoint)
        strategy.teardown = self.closing_before(strategy.teardown)
        for name in _METHODS if fsdp1 else (*_METHODS, *_STATE_DICTS):
            setattr(strategy, name, getattr(self, f"_{name}"))

    def _lightning_module_state_dict(self) -> dict[str, Any]:
        """As the strategy's own method, but nothing is copied to the host."""
        return get_model_state_dict(self._strategy.model, options=_ON_DEVICE)

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As the strategy's own method, but nothing is copied to the host."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
        return get_optimizer_state_dict(self._strategy.model, optimizer, options=_ON_DEVICE)

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Replaces ``save_checkpoint`` of the strategy."""
        filepath = self._strategy.broadcast(filepath)  # the path of rank 0, as in the strategy
        location.refuse_address(filepath)
        final = Path(os.fspath(filepath)).absolute()

        def write(folder: Path, snapshots: list[Snapshot]) -> None:
            strategy = self._strategy
            with self.sharded.writing(folder, [strategy.model], strategy.optimizers, snapshots, fsdp1=self._fsdp1):
                self._stock_save(checkpoint, folder, storage_options)

        with asking.closing(self.free):
            self.save(final, write, needed=asking.needed(), meets=True)

    def _remove_checkpoint(self, filepath: Any) -> None:
        """Replaces ``remove_checkpoint`` of the strategy: waits for begun saves first; keeps it if the last failed."""
        if self._strategy.is_global_zero:
            self.files.remove(Path(os.fspath(filepath)).absolute())
