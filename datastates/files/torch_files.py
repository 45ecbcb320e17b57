"""Writes state dicts as files for ``torch.load``, and tensors as safetensors, while training goes on."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from datastates._base.loaded import loaded
from datastates.commit.pending import Pending
from datastates.errors import ProviderError
from datastates.executor.make import make_executor, prepare
from datastates.files.in_flight import InFlight
from datastates.files.settings import FileSettings
from datastates.files.transaction import Transaction
from datastates.providers.nested.tree import TreeProvider
from datastates.ranks.world import SoloWorld
from datastates.saving.container_frame import ContainerFraming
from datastates.saving.engine import Engine
from datastates.saving.frame import Framing
from datastates.saving.safetensors_frame import SafetensorsFraming
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot, wait_ended
from datastates.state import arrays, keys
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Shard
from datastates.storage import Location
from datastates.storage.location import PathLike

Lazy = Callable[[str, Any], bool]
"""Given a tensor and its key (``state_dict/layer.weight``), whether only an optimizer step changes it."""

_WORD = 8
"""Bytes that a fingerprint takes at once."""


class _StateDict(TreeProvider):
    """A state dict on its way into a file. The framework that saved it restores it."""

    def __init__(self, name: str, state: Any, lazy: Lazy) -> None:
        super().__init__(name)
        self._state = state
        self._lazy = lazy

    def value(self) -> object:
        return self._state

    def is_lazy(self, key: str, array: object) -> bool:
        torch: Any = loaded("torch")
        return torch is not None and isinstance(array, torch.Tensor) and self._lazy(key, array)

    def match(self, stored: object, saved: Saved) -> NoReturn:
        raise NotImplementedError(f"{self.name!r}: its framework puts it back")

    def accept(self, value: Any) -> NoReturn:
        raise NotImplementedError(f"{self.name!r}: its framework puts it back")


class _NamedTensors(StateProvider):
    """Tensors by name, each contiguous in memory of its own. The framework that saved them restores them."""

    def __init__(self, name: str, tensors: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._tensors = tensors

    def shards(self) -> Sequence[Shard]:
        try:  # one by one: tensors of one storage are written apart
            return [arrays.array_shard(keys.component(n), t, lazy=True) for n, t in self._tensors.items()]
        except TypeError as error:
            raise ProviderError(str(error)) from error


class TorchFiles(InFlight):
    """Writes the files of checkpoints in the background, and lets the checkpoints end in order.

    Used on one thread at a time. Threads and memory are allocated by the first file, and again after :meth:`close`.
    """

    def __init__(self, settings: FileSettings) -> None:
        """Take the settings; nothing is started yet."""
        super().__init__(settings)
        self._engine: Engine | None = None
        self._savers: dict[tuple[object, ...], Saver] = {}

    def __reduce__(self) -> tuple[type[TorchFiles], tuple[FileSettings]]:
        """Make copies with the settings alone: threads, memory and files under way stay here."""
        return type(self), (self.settings,)

    def _writing(self) -> Engine:
        self._start()
        if self._engine is None:
            # a thread for each file in flight: with fewer, the gate would wait for the storage of others
            self._engine = Engine(make_executor(self.settings), SoloWorld(), threads=1024, auto_gate=True)
            self._savers = {}
        return self._engine

    def prepare(self) -> None:
        """Allocate threads now, and the host cache as :func:`datastates.executor.make.prepare` does."""
        prepare(self._writing().executor, self.settings)

    def write(self, kind: str, state: Any, path: PathLike, lazy: Lazy, *, attempt: str | None = None) -> Snapshot:
        """Begin to write a state dict as a file for ``torch.load``; returns once everything that is not lazy is copied.

        Args:
            kind: Names files that have the same structure in each checkpoint: they share a plan.
            state: Nested dicts, lists and tuples, with tensors in them.
            path: The file, under a temporary name.
            lazy: Chooses the tensors that are captured while training goes on.
            attempt: A name that all files of one checkpoint share; by default a new one.

        Raises:
            ProviderError: Something in ``state`` does not pickle; the message names it.
        """
        begin, provider = time.monotonic(), _StateDict(kind, state, lazy)
        attempt = attempt or secrets.token_hex(4)
        return self._take((_StateDict, kind), ContainerFraming(bare=True), provider, path, attempt, begin)

    def write_tensors(
        self, tensors: Mapping[str, Any], path: PathLike, metadata: Mapping[str, str], lazy: Lazy
    ) -> Snapshot:
        """Begin to write tensors as a safetensors file; returns once everything that is not lazy is copied.

        Args:
            tensors: The tensors by name.
            path: The file. Files of the same name in other folders have the same structure in each checkpoint.
            metadata: Further texts for the header, by name.
            lazy: Chooses the tensors that are captured while training goes on, by name and tensor.

        Raises:
            ProviderError: Tensors share memory, or the format cannot hold one; the message names it.
        """
        begin, name = time.monotonic(), Location(path).name
        # a fingerprint begins on a word of the file: it may see nothing of a tensor that is smaller
        watched = {n for n, t in tensors.items() if t.nbytes >= _WORD and lazy(n, t)}
        own = {n: (t if n in watched else t.detach().clone()).contiguous() for n, t in tensors.items()}
        kind, provider = (_NamedTensors, name, *sorted(metadata.items())), _NamedTensors(name, own)
        return self._take(kind, SafetensorsFraming(metadata), provider, path, secrets.token_hex(4), begin)

    def _take(
        self,
        kind: tuple[Any, ...],
        framing: Framing,
        provider: StateProvider,
        path: PathLike,
        attempt: str,
        begin: float,
    ) -> Snapshot:
        """Begin to write a file, with the plan of the last one of its kind if the structure is the same."""
        engine = self._writing()
        if kind not in self._savers:
            self._savers[kind] = Saver(engine.executor, framing)
        return engine.take_file(self._savers[kind], [provider], Location(path), attempt=attempt, begin=begin)

    @contextlib.contextmanager
    def ending(self, save: Transaction, pending: Pending, *, alone: bool = False) -> Iterator[None]:
        """A context that begins the files of a checkpoint. After it, the checkpoint ends in the background.

        An error that leaves the context gives the checkpoint up: it ends with that error, which is raised, too.

        Args:
            save: The checkpoint.
            pending: The folder that its files are written into.
            alone: Whether no other rank waits for the checkpoint. Given up, it is only abandoned.
        """
        try:
            yield
            self.put(save)
        except BaseException as error:
            if not alone:
                save.written += [one for one in self._under_way(pending) if one not in save.written]
                save.give_up(error)
                self.put(save)
            elif save.withdraw():
                self.give_up(pending)
            raise

    def give_up(self, pending: Pending) -> None:
        """Abandon a folder, if need be in the background, once the files that are being written into it have ended."""
        written = self._under_way(pending)

        def abandon() -> None:
            wait_ended(written)
            for snapshot in written:
                snapshot.exception()  # nobody waits for the file any more
            pending.abandon()

        if written:
            self._start().do(abandon)
        else:
            abandon()

    def _under_way(self, pending: Pending) -> list[Snapshot]:
        in_flight = self._engine.pending() if self._engine is not None else []
        return [one for one in in_flight if pending.directory in Location(one.path).parents]

    def close(self) -> None:
        """As :meth:`free`; then wait until what has ended is in its tiers, but not for a tier that fails."""
        try:
            self.free()
        finally:
            self.drains.close()

    def free(self) -> None:
        """Wait until everything begun has ended, and free threads and memory. Idempotent.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        """
        if self._ends is None or os.getpid() != self._process:
            return
        self.wait()
        self._ends.stop()
        self._ends.join()
        if self._engine is not None:
            self._engine.close()
        self._ends = self._engine = self._last = None
        try:
            self.finish()
        finally:  # the log has told of the others
            for save in self.saves:
                save.undelivered()
