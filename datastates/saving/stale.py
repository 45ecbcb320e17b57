"""Tells saves of parameters that an optimizer should have changed, and that are as they were in the last save."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from datastates._base import log
from datastates._base.columns import U8, U64, Bools
from datastates._base.sizes import CHUNK
from datastates.container.partial_records import same_places, same_rows
from datastates.errors import StaleStateError
from datastates.saving.container_frame import ContainerFrame
from datastates.saving.structure import Structure

OnStale: TypeAlias = Literal["warn", "error", "ignore"]
_NAMED = 3
"""Keys that a message names."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """An optimizer that has stepped, with the memory of its parameters.

    Attributes:
        name: Its class.
        places: The address and the length in bytes of each parameter.
        shapes: How many parameters have each shape.
    """

    name: str
    places: list[tuple[int, int]]
    shapes: Counter[tuple[int, ...]]


class Watch:
    """Compares each save of a run with the one before. For one thread at a time.

    torch counts no steps that say something here: a fused step of no effect is one, too. So the optimizers are noted
    whose ``step()`` was called.
    """

    def __init__(self, on_stale: OnStale) -> None:
        """Begin, without a save."""
        self._on_stale = on_stale
        self._last: tuple[int, ContainerFrame, U8] | None = None
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    def note(self, optimizer: Any) -> None:
        """Note that an optimizer steps, unless it should change nothing: a warm-up begins so. Any thread."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        if not all(isinstance(rate, (int, float)) and rate == 0 for rate in rates):
            self._stepped.add(optimizer)

    def stepped(self) -> list[Stepped]:
        """The optimizers that have stepped since the last call."""
        found = list(self._stepped)
        self._stepped = weakref.WeakSet()
        return [_described(optimizer) for optimizer in found]

    def compare(
        self,
        step: int,
        frame: ContainerFrame,
        structure: Structure,
        pointers: U64,
        hashes: U8,
        stepped: Sequence[Stepped],
    ) -> None:
        """Compare a save with the one before.

        Args:
            step: Its step.
            frame: Its frame.
            structure: Its structure.
            pointers: The address of each of its buffers.
            hashes: The hash of each chunk, in the order of the file.
            stepped: The optimizers that have stepped since the one before.

        Raises:
            StaleStateError: Parameters are stale, and ``on_stale`` says "error".
        """
        last, self._last = self._last, (step, frame, hashes)
        if last is None or not stepped:
            return
        before, then, known = last
        if not (same_places(frame.records, then.records) and same_rows(frame.table, then.table)):
            return
        state = _State.of(frame, structure, pointers, (known != hashes).any(axis=1))
        for optimizer in stepped:
            if keys := state.stale(optimizer):
                named = ", ".join(map(repr, keys[:_NAMED])) + (f" and {len(keys) - _NAMED} more" * (len(keys) > _NAMED))
                text = (
                    f"step {step}: {optimizer.name} has stepped since step {before}, and of its parameters nothing has "
                    f"changed in what is saved: {named}. Is this the live state, and does the optimizer change it?"
                )
                if self._on_stale == "error":
                    raise StaleStateError(text)
                log.warning("%s", text)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The saved arrays, and which chunks have changed."""

    frame: ContainerFrame
    structure: Structure
    pointers: U64
    changed: Bools
    order: np.ndarray[Any, Any] = field(repr=False)
    first: np.ndarray[Any, Any] = field(repr=False)

    @classmethod
    def of(cls, frame: ContainerFrame, structure: Structure, pointers: U64, changed: Bools) -> _State:
        nbytes = frame.plan.source_nbytes.astype(np.int64)[frame.plan.order]
        first = np.zeros(len(pointers) + 1, np.int64)  # of each source, in the order of the file
        counts = -(-nbytes // CHUNK)
        first[frame.plan.order] = np.cumsum(counts) - counts
        return cls(frame, structure, pointers, changed, np.argsort(pointers, kind="stable"), first)

    def stale(self, optimizer: Stepped) -> list[str]:
        """The keys of the optimizer's parameters, or of arrays in their place, if all are as they were."""
        found = [place for address, nbytes in optimizer.places if (place := self._find(address, nbytes)) is not None]
        if found:
            is_stale = not any(self.changed[begin:end].any() for _, begin, end in found)
            sources = {source for source, _, _ in found}
            return [self.structure.key(i) for i, one in enumerate(self.structure.source) if one in sources and is_stale]
        # none of its parameters is saved: a copy of them may be
        for number in range(len(self.structure.names)):
            rows = [i for i, (provider, _) in enumerate(self.structure.arrays) if provider == number]
            shapes = Counter(tuple(self.structure.arrays[i][1].shape) for i in rows)
            if optimizer.shapes <= shapes and not any(self._has_changed(self.structure.source[i]) for i in rows):
                return [self.structure.key(i) for i in rows]
        return []

    def _find(self, address: int, nbytes: int) -> tuple[int, int, int] | None:
        """The source that has a range of memory, and its chunks."""
        at = int(np.searchsorted(self.pointers[self.order], address, side="right")) - 1
        if at < 0:
            return None
        source = int(self.order[at])
        begin = address - int(self.pointers[source])
        if begin + nbytes > int(self.frame.plan.source_nbytes[source]):
            return None
        first = int(self.first[source])
        return source, first + begin // CHUNK, first + -(-(begin + nbytes) // CHUNK)

    def _has_changed(self, source: int) -> bool:
        first = int(self.first[source])
        return bool(self.changed[first : first - (-int(self.frame.plan.source_nbytes[source]) // CHUNK)].any())


def _described(optimizer: Any) -> Stepped:
    parameters = [_local(p) for group in optimizer.param_groups for p in group["params"]]
    places = [(p.data_ptr(), p.numel() * p.element_size()) for p in parameters if p.numel()]
    return Stepped(type(optimizer).__name__, places, Counter(tuple(p.shape) for p in parameters if p.numel()))


def _local(parameter: Any) -> Any:
    to_local: Callable[[], Any] | None = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
