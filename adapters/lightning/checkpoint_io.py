"""Lightning: a ``TorchCheckpointIO`` that saves Lightning's own files while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Unpack

from datastates._base.sizes import LARGE_RECORD
from datastates.adapters.lightning import asking
from datastates.adapters.shared.guarded import unguarded_storages
from datastates.adapters.shared.tried import warn_of_untried
from datastates.errors import StorageError
from datastates.files import hidden, in_flight, looks, torch_loads
from datastates.files.hidden import HiddenFile
from datastates.files.settings import FileOptions, FileSettings
from datastates.files.torch_files import Lazy, TorchFiles
from datastates.formats import own
from datastates.saving.snapshot import Snapshot, has_ended
from datastates.state import arrays, storages
from datastates.storage import Location, folders_of, location

try:
    from lightning.fabric.plugins import TorchCheckpointIO
except ImportError:
    from lightning_fabric.plugins import TorchCheckpointIO  # type: ignore[assignment]

_one_at_a_time = threading.RLock()
"""A wrapper may save on a thread of its own, while checkpoints are removed on the training thread."""


def _guarded() -> Lazy:
    """The default for ``lazy``: large states of optimizers, and large parameters that only an optimizer's step changes.

    A ``state_dict`` may also hold buffers, averages of the weights, and parameters that other code updates.
    """
    trainer, guarded = asking.trainer(), frozenset[int]()
    if trainer is not None:
        module = trainer.lightning_module
        parameters = (p for p in module.parameters() if arrays.kind_of(p) is not None)
        guarded = frozenset(map(storages.address, parameters)) - unguarded_storages(module, trainer.optimizers)

    def is_guarded(key: str, tensor: torch.Tensor) -> bool:
        section, *path = key.split("/")
        if tensor.nbytes < LARGE_RECORD:
            return False
        if section == "state_dict":
            return storages.address(tensor) in guarded
        return section == "optimizer_states" and "param_groups" not in path

    return is_guarded


class DataStatesCheckpointIO(TorchCheckpointIO):
    """Saves checkpoints while training goes on, as ``Trainer(plugins=[DataStatesCheckpointIO()])``.

    Each checkpoint is one file that ``torch.load``, and Lightning without this package, reads. The file gets its name
    once it is on stable storage. A checkpoint that Lightning removes is removed once all checkpoints that were begun
    before have ended, and only if the last of them has succeeded.

    Large parameters and optimizer states are captured lazily: every torch optimizer's step waits until they are
    captured. Everything else is copied inside ``save_checkpoint()``: buffers, averages of the weights, and trainable
    parameters that no optimizer of the trainer holds. A checkpoint at the address of a store is saved, read and removed
    by Lightning's own plugin, at once.
    """

    def __init__(self, *, lazy: Lazy | None = None, **options: Unpack[FileOptions]) -> None:
        """Take the settings; the first save allocates threads and memory.

        Args:
            lazy: Given the key of a tensor in Lightning's checkpoint, such as ``state_dict/layer.weight``, and the
                tensor, whether only an optimizer step changes it. By default chosen as told above.
            **options: Fields of :class:`~datastates.files.settings.FileSettings`.

        Raises:
            SettingsError: An option is unknown or its value is invalid; the message names it.
        """
        super().__init__()
        self.lazy = lazy
        warn_of_untried("lightning")
        self.files = TorchFiles(FileSettings.of(options))
        self.snapshots: dict[Path, Snapshot] = {}
        """The snapshots of the last checkpoints, by file. *Committed* means that the file is on stable storage."""
        self._swept: set[Path] = set()
        self._thread = threading.get_ident()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, for when a trainer is copied or pickled: it has no checkpoint under way."""
        return {**vars(self), "snapshots": {}}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Begin to save a checkpoint; returns once everything that may change at any time is copied.

        Code that looks at the file before it has its name waits. If another rank might look, or code unnoticed, this
        call returns once the file has its name, and raises its failure: if something else in Lightning than its
        ``ModelCheckpoint`` saves, or a subclass of that, if a logger of the program's own hears of it, outside of
        ``fit``, or on another thread than the training thread. Where Lightning will not call :meth:`teardown` after it,
        which is outside of ``fit`` and in ``AsyncCheckpointIO``, this call frees threads and memory.

        Args:
            checkpoint: Lightning's checkpoint: nested containers with tensors in them.
            path: The file, which may begin with ``file://``, or the address of a store.
            storage_options: Must be None, as for Lightning's own plugin.

        Raises:
            TypeError: There are ``storage_options``.
            ProviderError: Something in the checkpoint does not pickle; the message names it.
            DatastatesError: With ``on_error="raise"``, an earlier checkpoint has failed and nothing is saved, or
                it has waited for this one, which has failed.
        """
        final, needed = _file(path), self._needed()
        if final is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            self.files.show(os.fspath(path), "Lightning's own plugin writes to the addresses of stores")
            return
        with asking.closing(self._free):
            with _one_at_a_time, looks.unwatched():
                self.files.begin()
                try:
                    self._begin(checkpoint, final)
                except StorageError as error:
                    self.files.fail(_called(final), error)
            if needed is not None:
                self.files.show(final.name, needed)

    def _needed(self) -> str | None:
        """Name the code that may look at the checkpoint unnoticed as soon as it is saved; None if no code does."""
        if threading.get_ident() not in (self._thread, threading.main_thread().ident):
            return "another thread than the training thread saves it"
        return asking.needed()

    def _begin(self, checkpoint: dict[str, Any], final: Path) -> None:
        home = Location(final.parent)
        folders_of(home).make_folder(home)
        if final.parent not in self._swept:
            self._swept.add(final.parent)
            hidden.sweep(home)
        file = HiddenFile(final)

        def publish(failure: BaseException | None) -> None:
            try:
                if failure is not None:
                    raise failure
                hidden.publish([file])
            finally:
                file.abandon()

        save = self.files.transaction(_called(final), publish)
        save.shown, save.made = looks.whole(final, save.see), final
        with self.files.ending(save, file, alone=True):
            file.begin()
            save.written.append(self.files.write("checkpoint", checkpoint, file.written, self.lazy or _guarded()))
            in_flight = {path: one for path, one in self.snapshots.items() if not has_ended(one)}
            self.snapshots = in_flight | {final: save.written[0]}

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint. A file of this package is verified; Lightning's own plugin reads any other.

        Args:
            path: The file.
            map_location: As for ``torch.load``; by default tensors are in host memory.
            weights_only: False trusts every class in the file. True and None trust classes in torch's ``safe_globals``.

        Returns:
            Lightning's checkpoint.

        Raises:
            FileNotFoundError: There is no such file.
            CorruptError: The file does not match its checksums; the message names the tensor.
            FormatError: The file is one of this package's, and damaged.
            TrustError: The file holds an object of a class that is not trusted.
        """
        in_flight.wait_for_all()
        file = _file(path)
        if file is None or not file.exists() or not own.has_ending(Location(file)):
            return super().load_checkpoint(path, map_location, weights_only)
        trust = "all" if weights_only is False else ()
        found: dict[str, Any] = torch_loads.load(file, self.files.settings, map_location, trust)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint once all checkpoints begun before have ended; keep it if the last of them failed.

        Args:
            path: The file or folder.
        """
        if (file := _file(path)) is None:
            super().remove_checkpoint(path)
            return
        with _one_at_a_time:
            self.files.remove(file)

    def _free(self) -> None:
        with _one_at_a_time:
            self.files.free()

    def teardown(self) -> None:
        """Wait until all checkpoints have ended, then free threads and memory; a later save allocates them again.

        Waits until they are in their tiers, too, but not for a tier that fails.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        """
        with _one_at_a_time:
            self.files.close()


def _called(final: Path) -> str:
    return f"the checkpoint {final}"


def _file(path: Any) -> Path | None:
    """The file that a path names; None for the address of a store."""
    name = os.fspath(path).removeprefix("file://")
    return None if location.scheme_of(name) else Path(Location.of(name))


with contextlib.suppress(ImportError):  # the Trainer of pytorch_lightning checks for that package's class
    from lightning_fabric.plugins import CheckpointIO as _OfTheOther

    if not issubclass(DataStatesCheckpointIO, _OfTheOther):
        _OfTheOther.register(DataStatesCheckpointIO)
