"""The checkpoint engine with which DeepSpeed saves and loads its files."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from datastates._base import log
from datastates.adapters.deepspeed import binding
from datastates.adapters.deepspeed.save import Save, every, sweep
from datastates.adapters.deepspeed.settings import DeepSpeedSettings
from datastates.adapters.shared.guarded import unguarded_storages
from datastates.errors import CommitError, FormatError
from datastates.files import torch_loads
from datastates.files.hidden import HiddenFile
from datastates.files.torch_files import Lazy, TorchFiles
from datastates.formats import own
from datastates.ranks.world import SoloWorld, World, world_of
from datastates.saving import gate
from datastates.saving.snapshot import wait_free
from datastates.storage import Location, location

_STATE = ("module", "optimizer", "optimizer_state_dict", "frozen_param_fragments")
"""Keys of DeepSpeed's parameters and optimizer states. All else in a file that has one is small or the client's."""


class CheckpointEngine:
    """Saves DeepSpeed's files lazily, and loads them. DeepSpeed makes one for each of its engines.

    ``save_checkpoint()`` returns once it has copied everything that may change at any time. Parameters and optimizer
    states are captured while training goes on. The next optimizer step waits until they are captured, by a hook that
    torch calls before every step of every optimizer. In the background each rank writes its files under temporary
    names. Once all files of all ranks are on stable storage, they get their names, and then ``latest`` is replaced.

    Not thread-safe: call it on the training thread, as DeepSpeed does. The objects in :attr:`saves` may be used on any
    thread.
    """

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        """Make an engine for one DeepSpeed engine. All ranks must make theirs in the same order.

        Args:
            deepspeed_config: A ``DeepSpeedConfig``. Its ``datastates_config.config`` is the JSON file's entry; see
                :class:`~datastates.adapters.deepspeed.settings.DeepSpeedSettings`.
            rank: The global rank of this process.

        Raises:
            SettingsError: The entry is invalid; the message names the field.
            RuntimeError: The interface of this version of DeepSpeed is not supported.
        """
        binding.bind()
        self.settings = DeepSpeedSettings.of_entry(deepspeed_config.datastates_config.config)
        self.rank = rank
        self._numbers = itertools.count()
        self._opened: Save | None = None
        self._spoiled: Exception | None = None
        self._context: tuple[Any, Path, bool] | None = None
        self._files = TorchFiles(self.settings)
        self._swept: set[Path] = set()
        self._world: World = SoloWorld()
        self._closed = False
        self._process = os.getpid()
        if self.settings.enabled:
            self._world = world_of(None, None, Location("deepspeed"), self.settings.rank_timeout)
            self._files.prepare()
            atexit.register(self._close_at_exit)

    @property
    def saves(self) -> list[Save]:
        """The last checkpoints that were begun, oldest first; at most ``max_in_flight`` of them."""
        sealed = [save for save in self._files.saves if isinstance(save, Save)]
        return sealed if self._opened is None or self._opened in sealed else [*sealed, self._opened]

    @property
    def failures(self) -> int:
        """The number of checkpoints that have failed so far."""
        return self._files.failures

    # --- saving

    def begin(self, engine: Any, root: Path, *, latest: bool) -> None:
        """Note that a DeepSpeed engine begins ``save_checkpoint()``.

        Waits until no other engine of this process is saving into the same folder: the later call is to be the newest.

        Args:
            engine: The DeepSpeed engine.
            root: The folder that it saves in, absolute.
            latest: Whether the file ``latest`` there will name the checkpoint.
        """
        for save in every():
            if save.root == root and save not in self.saves:
                save.wait()
        self._context = engine, root, latest

    def create(self, tag: str) -> None:
        """Begin a checkpoint. Waits while ``max_in_flight`` are under way.

        Args:
            tag: DeepSpeed's tag.

        Raises:
            DatastatesError: With ``on_error="raise"``, an earlier checkpoint has failed; nothing is begun. All ranks
                raise at the same call.
            SnapshotAbandonedError: This process was forked from the one that saves.
        """
        if not self.settings.enabled:
            return
        self._files.refuse_children()
        name = f"save/{next(self._numbers)}"  # before anything can fail: all ranks must count the same
        if self._opened is not None:
            self.seal(CommitError(f"the checkpoint {self._opened.tag} was begun and not finished"))
        self._files.begin()
        _, root, latest = self._context or (None, None, False)
        raises = self.settings.on_error == "raise"
        self._opened = Save(name, tag, self._world, root, latest=latest, raises=raises)
        if root is not None and self.rank == 0 and root not in self._swept:
            self._swept.add(root)
            sweep(root)

    def withdraw(self) -> None:
        """Forget the checkpoint that was begun, where all ranks do so at the same call and nothing is written."""
        self._opened = None

    def save(self, state_dict: dict[Any, Any], path: str) -> None:
        """Begin to write one file of the checkpoint; copies everything that is not lazy before it returns.

        Within ``save_checkpoint()``, an error is raised at the end of that call.

        Args:
            state_dict: The contents of the file.
            path: The file.

        Raises:
            TypeError: ``state_dict`` is no dict.
            ValueError: ``path`` is the address of a store instead of a file path.
            ProviderError: Something in ``state_dict`` does not pickle; the message names it.
        """
        if not self.settings.enabled:
            torch.save(state_dict, path)
            return
        try:
            location.refuse_address(path)
            self._begin_file(state_dict, path)
        except Exception as error:
            if not self.defer(error):
                raise

    def defer(self, error: Exception) -> bool:
        """Within ``save_checkpoint()``, keep an error for the end of that call. Returns False outside of it.

        If it were raised earlier, other ranks would wait for this one.
        """
        if self._context is not None:
            self._spoiled = self._spoiled or error
        return self._context is not None

    def _begin_file(self, state_dict: dict[Any, Any], path: str) -> None:
        if not isinstance(state_dict, dict):
            raise TypeError(f"{path}: a state dict is wanted, not a {type(state_dict).__name__}")
        # a file outside of a checkpoint is saved alone: other ranks need not save anything
        save = self._opened or Save("alone", "", SoloWorld())
        final = Path(path).absolute()
        unguarded = unguarded_storages(self._context[0].module) if self._context else frozenset()
        lazy = _lazy_in(state_dict, unguarded)
        file = HiddenFile(final, name=f".{final.name}")  # DeepSpeed's patterns do not match it
        try:
            file.begin()
            kind = final.name.removesuffix(".pt")
            save.add(self._files.write(kind, state_dict, file.written, lazy, attempt=save.attempt), file)
        except BaseException:
            if not save.has(file):
                self._files.give_up(file)
            raise
        if self._opened is None:
            save.end()
            if save.exception is not None:
                raise save.exception

    def commit(self, tag: str) -> bool:
        """End a checkpoint outside of ``save_checkpoint()``, as of ``save_16bit_model``; wait until it is complete.

        Raises:
            DatastatesError: With ``on_error="raise"``, it has failed.
        """
        del tag
        if self._context is None and self._opened is not None:
            save = self._opened
            self.seal()
            save.wait()
            self._files.tell(save)
        return True

    def give_up(self, error: BaseException) -> None:
        """End a checkpoint as failed, and tell all ranks, where this rank has raised before :meth:`commit`."""
        save = self._opened
        self.seal(error)
        if save is not None:
            save.wait()
            save.undelivered()  # the error is on its way

    def seal(self, given_up: BaseException | None = None) -> None:
        """Note that all files of the checkpoint have been passed to :meth:`save`; the rest goes on in the background.

        Raises the first error that :meth:`defer` has kept, unless ``given_up`` is given.

        Args:
            given_up: Why this rank did not pass all files. Then the checkpoint fails on all ranks.
        """
        self._context = None
        spoiled, self._spoiled = self._spoiled, None
        if (opened := self._opened) is not None:
            opened.hide()
            is_sealed = opened in self._files.saves  # by a call that was interrupted
            if (why := given_up or spoiled) is not None and not is_sealed:
                opened.give_up(why)
            self._files.put(opened)
            self._opened = None  # not earlier: where this is interrupted, the next call seals it
        if spoiled is not None and given_up is None and not self.only_logs(spoiled):
            raise spoiled

    def only_logs(self, error: BaseException, *, midway: bool = False) -> bool:
        """Whether a failure is only logged: one of storage, with ``on_error="warn"``.

        ``midway``: it has ended DeepSpeed's call, in which other ranks may wait for this one.
        """
        is_alone = self._world.size == 1
        return self.settings.on_error == "warn" and isinstance(error, OSError) and (is_alone or not midway)

    def wait(self, persist: bool = True) -> bool:
        """Wait for the checkpoints under way.

        Args:
            persist: True: wait until every checkpoint is complete. False: until the training state may change.

        Returns:
            True.

        Raises:
            DatastatesError: With ``on_error="raise"`` and ``persist``, a checkpoint has failed and this was not raised
                yet.
        """
        if persist:
            self._files.finish()
        else:
            gate.pass_all()
        return True

    def wait_captured(self) -> None:
        """Wait until nothing reads the memory of the training state any more. Raises no failures."""
        for save in self.saves:
            for snapshot in save.written:
                wait_free(snapshot)

    # --- loading

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file that this or another engine saved, as ``torch.load`` does. Every class is trusted.

        Args:
            path: The file.
            map_location: As for ``torch.load``. By default, tensors of a file that this engine saved are on the CPU.

        Returns:
            The object in the file.

        Raises:
            CorruptError: A file that this engine saved does not match its checksums; the message names the tensor.
            FormatError: The file is damaged, or torch cannot read it; the message names it.
            StorageError: The file cannot be read.
            SnapshotAbandonedError: The process that this one was forked from was still saving the file.
        """
        file = Path(Location.of(path))
        for save in every():
            if file.absolute() in save.snapshots:
                save.wait()
        if own.has_ending(Location(file)):
            return torch_loads.load(file, self.settings, map_location, trust="all")
        gate.pass_all()  # loaded tensors are about to be copied over the training state
        try:
            return torch.load(path, map_location=map_location, weights_only=False)
        except Exception as error:  # a damaged file makes torch, tarfile and pickle raise almost anything
            raise FormatError(f"{path}: {type(error).__name__}: {error}") from error

    # --- ending

    def close(self) -> None:
        """Wait until every checkpoint is complete, then free threads and memory. Idempotent.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        try:
            if self._opened is not None:
                self.seal(CommitError(f"the checkpoint {self._opened.tag} was begun and not finished"))
        finally:
            try:
                self._files.close()
            finally:
                self._world.close()

    def _close_at_exit(self) -> None:
        """Close before this process ends: it may host the Store in which other ranks look up how a checkpoint ended."""
        try:
            self.close()
        except Exception as error:
            log.error("a checkpoint failed, and nobody asked", of=error)


def _lazy_in(state: dict[Any, Any], unguarded: Collection[int]) -> Lazy:
    """A :data:`Lazy` for one file: chooses tensors that only an optimizer step changes, parameters and its states.

    Buffers, tensors in the optimizer's parameter groups, and the client's own may change at any time. Files
    without DeepSpeed's usual keys (a pipeline's layers, experts) hold only parameters and buffers.

    Args:
        state: The contents of the file.
        unguarded: Addresses of the storages that may change outside of a step.
    """
    has_sections = any(section in state for section in _STATE)

    def is_lazy(key: str, tensor: torch.Tensor) -> bool:
        path = key.split("/")
        if (has_sections and path[0] not in _STATE) or "param_groups" in path:
            return False
        return tensor.untyped_storage().data_ptr() not in unguarded

    return is_lazy
