"""Lazy staging: instead of a copy, the live state dict itself, guarded until it has been captured."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from datastates._base.sizes import LARGE_RECORD
from datastates._base.waiting import Flag
from datastates.errors import DatastatesError, TornSnapshotError
from datastates.files import samples
from datastates.files.torch_files import Lazy
from datastates.saving import gate
from datastates.saving.snapshot import abandon, begun_later, error_of, fail, reach, wait_free
from datastates.state import arrays, devices, dtensors, subclasses
from datastates.state import versions as array_versions
from datastates.state.laziness import is_lazy_by_default
from datastates.storage import Location

GRACE = 60.0
"""Seconds after staging in which the save must begin."""
_POLL = 0.05
_DESCRIBING = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def is_large(name: str, tensor: Any) -> bool:
    """The default for ``lazy``: small tensors, such as buffers that a forward pass changes, are copied at once.

    Tensors that other libraries than torch can write are copied, too, by the rule for providers.
    """
    del name
    return tensor.nbytes >= LARGE_RECORD and is_lazy_by_default(tensor)


class Staged:
    """A state dict that training must not change from staging until it is captured.

    Attributes:
        state_dict: The live tensors, where they are lazy, and copies of everything else.
        snapshot: The snapshot, at which the gate waits; the save goes on with it.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        lazy: Lazy | None,
        *,
        step: int = 0,
        path: Location | None = None,
        grace: float = GRACE,
        kept: Sequence[tuple[str, Any]] | None = None,
        owned: bool = False,
    ) -> None:
        """Copy the state that may change at any time. The gate guards the rest from now on.

        Args:
            state_dict: The live state.
            lazy: Chooses tensors that are guarded instead of copied; None for none. Within an optimizer's ``step()``,
                all are copied.
            step: A number for the snapshot.
            path: The path of the checkpoint, if it is known.
            grace: Seconds in which :meth:`saved_by` must be called.
            kept: The live tensors in the state dict, by name. If given, nothing is copied.
            owned: Sharded tensors are copies that nothing else refers to. All others are copied, so no optimizer waits.
        """
        begin = time.monotonic()
        self._kept: list[tuple[str, Any]] = list(kept or ())
        self._devices: set[Any] = set()
        self._owned = owned
        chosen: Lazy = (lambda *_: False) if lazy is None or gate.is_in_step() else lazy  # the save begins after a step
        self.state_dict: dict[str, Any] = self._copied("", state_dict, chosen) if kept is None else state_dict
        tensors = [tensor for _, tensor in self._kept]
        self._before = array_versions.witness(tensors)
        self._samples = samples.take([] if owned else tensors)
        self._begun = Flag()
        self._saver: threading.Thread | None = None
        self._latest = begin + grace
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._streams = devices.side_streams(self._devices | {tensor.device for tensor in tensors})
        nbytes = sum(dtensors.local(tensor).nbytes for tensor in tensors)
        self.snapshot = begun_later(step, nbytes, begin, path, self.wait_begun)
        if not owned:
            gate.guard(self.snapshot, automatic=True)

    def _copied(self, path: str, value: Any, lazy: Lazy) -> Any:
        tensor, sharded, plain = _kinds()
        if isinstance(value, sharded):
            self._kept += [(path, shard.tensor) for shard in value.local_shards()]
            return value
        if isinstance(value, tensor):
            local = dtensors.local(value)
            # a change of other tensors, such as instances of subclasses, cannot be noticed: they are copied
            watched = type(local) in plain and arrays.kind_of(local) is not None
            if watched and (local is not value if self._owned else lazy(path, local)):
                self._kept.append((path, value))  # a DTensor has a version of its own
                return value
            self._devices.add(local.device)
            return _clone(value, local)
        if type(value) in (dict, OrderedDict):
            items = [(key, self._copied(f"{path}.{key}" if path else str(key), v, lazy)) for key, v in value.items()]
            return type(value)(items)
        if type(value) in (list, tuple):
            return type(value)(self._copied(f"{path}.{i}", item, lazy) for i, item in enumerate(value))
        return copy.deepcopy(value)

    @property
    def is_copy(self) -> bool:
        """Whether no live tensor is guarded, so that the state may change at once."""
        return not self._kept

    @property
    def is_claimed(self) -> bool:
        """Whether a save that will capture the state has begun."""
        return self._saver is not None

    def saved_by(self, thread: threading.Thread) -> None:
        """Note the thread that will capture the state. If that thread ends before, the gate opens."""
        with self._lock:
            self._saver = thread

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A context, on any thread, in which a save begins the capture.

        Copies that begin in it wait for the GPU work that was enqueued before staging, and for no later work. If the
        context is left by an error, the gate opens.
        """
        try:
            with devices.enqueueing_on(self._streams):
                yield
        except BaseException as error:
            self.give_up(error)
            raise
        self._end()

    def check(self) -> None:
        """Raise TornSnapshotError if the state has changed since staging, or the error for which it was given up."""
        if (error := self.snapshot.exception()) is not None:
            raise error  # the gate has been open since: the state may have changed
        tensors = [tensor for _, tensor in self._kept]
        versions, addresses = array_versions.witness(tensors)
        changed = ((versions != self._before[0]) | (addresses != self._before[1])).nonzero()[0].tolist()
        if not changed and not self._owned:  # memory that is still there may be read
            changed = samples.differences(self._samples, samples.take(tensors))
        if changed:
            raise TornSnapshotError([self._kept[i][0] for i in changed])

    def captured_elsewhere(self) -> None:
        """Note that nobody reads the state any more, and that this package does not capture it: torch writes it."""
        reach(self.snapshot, "captured")

    def give_up(self, error: BaseException) -> None:
        """Fail the snapshot and open the gate, as nobody will capture the state."""
        if not self._begun.is_set():
            fail(self.snapshot, error)
            self._end()

    def _end(self) -> None:
        """Let go of the state: from now on the snapshot's own gate holds, or the snapshot has failed."""
        self._kept, self._samples, self._streams = [], [], []
        self.state_dict = {}
        self._begun.set()

    def is_over(self) -> bool:
        """Whether the capture of the state has begun or never will. Gives up if nobody is left to begin it."""
        if not self._begun.is_set():
            if os.getpid() != self._process:  # a forked child: only its parent can capture it
                abandon(self.snapshot)
                self._end()
            with self._lock:
                if not self._saver.is_alive() if self._saver is not None else time.monotonic() > self._latest:
                    text = "the save ended before its state was captured: nothing was written of it"
                    self.give_up(DatastatesError(text))
                    self.snapshot.exception()  # the save reports an error of its own
        return self._begun.is_set() or error_of(self.snapshot) is not None

    def wait_begun(self) -> None:
        """Wait until the capture of the state has begun or never will."""
        while not self.is_over():
            self._begun.wait(_POLL)

    def wait_free(self) -> None:
        """Wait until the state may change."""
        self.wait_begun()
        wait_free(self.snapshot)


class StagedStateDict(dict[str, Any]):
    """A staged state dict on its way to the save that captures it, in this process. It refuses to be pickled."""

    def __init__(self, staged: Staged) -> None:
        """Take the state dict of ``staged``."""
        super().__init__(staged.state_dict)
        self._staged = staged

    def __reduce_ex__(self, protocol: object) -> Any:
        error = DatastatesError(
            "state that was staged lazily cannot be saved by another process: give dcp.async_save an async_stager that "
            "copies it, such as torch's DefaultStager"
        )
        self._staged.give_up(error)
        self._staged.snapshot.exception()  # it is reported by the raise
        raise error


def _clone(value: Any, local: Any) -> Any:
    is_composed = subclasses.is_composed(local)
    copied: Any = (
        subclasses.changed(value, lambda part: part.detach().clone()) if is_composed else value.detach().clone()
    )
    # methods that describe a tensor to torch, as Megatron-FSDP sets on unevenly sharded ones
    own = {name: hook for name, hook in vars(local).items() if name in _DESCRIBING}
    vars(dtensors.local(copied)).update(own)
    return copied


@cache
def _kinds() -> tuple[type[Any], Any, tuple[type[Any], ...]]:
    """Tensors, those of torch that are sharded without a DTensor, and the classes of plain ones."""
    import torch
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return torch.Tensor, ShardedTensor, (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
