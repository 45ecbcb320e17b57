"""The structure of a state: keys, types, shapes and places of its arrays, without the contents."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from datastates._base import gc_pause
from datastates._base.columns import I64, U8, U64, Bools
from datastates.executor.executor import Columns
from datastates.saving.replicas import ReplicaPlan
from datastates.state.shards import Buffer, Shard, Shards, full_key


class Places(NamedTuple):
    """Present addresses of a structure's memory.

    Attributes:
        columns: The buffers in the form that the executor takes.
        replicas: The address of each range of :attr:`Structure.replicas`; None without replicas.
    """

    columns: Columns
    replicas: U64 | None


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """A state as its providers describe it, without the contents. Successive snapshots of the same state share it.

    Attributes:
        names: The names under which the providers are stored.
        layouts: For each provider, the layout of its :class:`~datastates.state.shards.Shards`; None if it returned a
            plain list.
        arrays: Array shards, each with its provider's number.
        buffers: The distinct buffers that the arrays lie in.
        source: For each array shard, the number of its buffer.
        eager: For each buffer, whether it must be captured before ``snapshot()`` returns.
        witness: For each buffer, 1 if a lazy array lies in it, so it gets a fingerprint, else 0.
        columns: The buffers in the form that the executor takes, at their addresses when the structure was made.
        begins: For each array shard, the address of its buffer when the structure was made, even if another rank writes
            it; 0 for an empty buffer.
        placed: Numbers of the array shards that this rank writes bytes of, and the number of the buffer of each.
        devices: The CUDA devices that the buffers are on, ascending.
        nbytes: Bytes of all buffers.
        counted: Numbers of the lazy array shards whose changes torch counts.
        addresses: For each of ``counted``, the address of its first element.
        donatable: Numbers of the array shards in device memory that a computation of JAX may take over before the
            capture.
        replicas: The arrays whose copies on other ranks are compared; None if there are none.
        in_part: The full key of a JAX array or DTensor that lacks elements here; None if there is no such array, or if
            there are several ranks.
    """

    names: tuple[str, ...]
    layouts: tuple[tuple[Shard, ...] | None, ...]
    arrays: list[tuple[int, Shard]]
    buffers: list[Buffer]
    source: list[int]
    eager: list[bool]
    witness: U8
    columns: Columns
    begins: U64
    placed: tuple[I64, I64]
    devices: list[int]
    nbytes: int
    counted: I64
    addresses: I64
    donatable: list[int]
    replicas: ReplicaPlan | None
    in_part: str | None

    def key(self, i: int) -> str:
        """The full key of array shard number ``i``."""
        provider, shard = self.arrays[i]
        return full_key(self.names[provider], shard.key)

    def all_of(self, arrays: Bools) -> Bools:
        """For each buffer, whether something is so of all array shards in it."""
        buffers, source = np.zeros(len(self.buffers), bool), np.array(self.source, np.int64)
        buffers[source] = True
        buffers[source[~arrays]] = False
        return buffers

    @property
    def holds_state(self) -> bool:
        """Whether the structure's shards keep live arrays, as in plain lists. It then serves one snapshot only."""
        return None in self.layouts

    def serves(self, names: tuple[str, ...], layouts: tuple[tuple[Shard, ...] | None, ...]) -> bool:
        """Whether providers with these names and layouts have this structure. Addresses may differ."""
        return names == self.names and None not in layouts and all(map(operator.is_, layouts, self.layouts))

    def places(self) -> Places:
        """The memory as it was when the structure was made."""
        return Places(self.columns, None if self.replicas is None else self.replicas.addresses(self.begins))

    def places_now(self, described: Sequence[Sequence[Shard]]) -> Places | None:
        """The memory at its present addresses; None if now other arrays share memory with each other.

        Args:
            described: The shards of each provider, with the layouts of this structure.
        """
        if all(not isinstance(shards, Shards) or shards.addresses is None for shards in described):
            return self.places()
        begins, first = self.begins.copy(), 0
        for shards in described:
            assert isinstance(shards, Shards)
            own = slice(first, first + len(shards.layout))
            if shards.addresses is not None:
                begins[own] = np.where(begins[own] == 0, 0, shards.addresses)
            first = own.stop
        # all arrays are compared, because the rank that writes an array depends on the arrays that share its memory
        if (_firsts(begins) != _firsts(self.begins)).any():
            return None
        then, devices, streams = self.columns
        rows, buffers = self.placed
        pointers = then.copy()
        pointers[buffers] = begins[rows]
        now = pointers, devices, streams
        return Places(now, None if self.replicas is None else self.replicas.addresses(begins))

    @gc_pause.paused()
    def plan_key(self) -> tuple[Any, ...]:
        """A key that is equal for two structures that can share a plan. It has all facts but the memory addresses."""
        rows = tuple(
            (p, s.key, s.kind, s.dtype, s.shape, s.stride, s.global_shape, s.offset, s.flat, s.buffer_offset)
            for p, s in self.arrays
        )
        return self.names, rows, tuple(self.source), tuple(self.eager), tuple(b.nbytes for b in self.buffers)


def _firsts(addresses: U64) -> I64:
    """For each address, the number of the first equal address."""
    _, first, which = np.unique(addresses, return_index=True, return_inverse=True)
    return np.asarray(first[which], np.int64)
