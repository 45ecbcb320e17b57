"""Tells saves of parameters that an optimizer should have changed, and that are as they were in the last save."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from datastates._base import log
from datastates._base.columns import I64, U8, U64, Bools
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


class Saved(NamedTuple):
    """What a save consists of.

    Attributes:
        frame: Its frame.
        structure: Its structure.
        pointers: The address of each of its buffers.
        hashes: The hash of each chunk, in the order of the file.
    """

    frame: ContainerFrame
    structure: Structure
    pointers: U64
    hashes: U8


class Watch:
    """Compares each save of a run with the one before. Thread-safe."""

    def __init__(self, on_stale: OnStale) -> None:
        """Begin, without a save."""
        self._on_stale = on_stale
        self._last: tuple[int, int, ContainerFrame, U8] | None = None
        self._tickets = itertools.count()
        self._stepped: dict[int, weakref.ref[Any]] = {}  # each change is one operation: other threads step, too

    def note(self, optimizer: Any) -> None:
        """Note that an optimizer steps, with gradients. It never raises.

        Of a fused step under a GradScaler only the device knows whether it is one.
        """
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            every = (p for group in optimizer.param_groups for p in group["params"])
            if not hasattr(optimizer, "found_inf") and any(p.grad is not None for p in every):
                self._stepped[id(optimizer)] = weakref.ref(optimizer)

    def stepped(self) -> tuple[int, list[Stepped]]:
        """A ticket for a save, and the optimizers that have stepped since the last call."""
        found, self._stepped = self._stepped, {}
        optimizers = [optimizer for ref in found.values() if (optimizer := ref()) is not None]
        return next(self._tickets), [_described(one) for one in optimizers if _should_change(one)]

    def compare(self, step: int, save: Saved, ticket: int, stepped: Sequence[Stepped]) -> None:
        """Compare a save with the one before.

        Args:
            step: Its step.
            save: What is saved.
            ticket: Its ticket.
            stepped: The optimizers that have stepped since the one before.

        Raises:
            StaleStateError: Parameters are stale, and ``on_stale`` says "error".
        """
        last = self._last
        if last is not None and last[0] > ticket:  # a later save was faster
            return
        self._last = ticket, step, save.frame, save.hashes
        if last is None or last[0] != ticket - 1 or not stepped:
            return
        _, before, then, known = last
        if not (same_places(save.frame.records, then.records) and same_rows(save.frame.table, then.table)):
            return
        state = _State.of(save, (known != save.hashes).any(axis=1))
        for optimizer in stepped:
            keys, is_sure = state.stale(optimizer)
            if keys:
                named = ", ".join(map(repr, keys[:_NAMED])) + (f" and {len(keys) - _NAMED} more" * (len(keys) > _NAMED))
                text = (
                    f"step {step}: {optimizer.name} has stepped since step {before}, and of its parameters nothing has "
                    f"changed in what is saved: {named}. Is this the live state, and does the optimizer change it?"
                )
                if is_sure and self._on_stale == "error":
                    raise StaleStateError(text)
                log.warning("%s", text)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The saved arrays, and which chunks have changed."""

    save: Saved
    changed: Bools
    begins: list[int]
    """The addresses of the buffers, ascending."""
    order: list[int]
    first: I64
    """The first chunk of each buffer."""

    @classmethod
    def of(cls, save: Saved, changed: Bools) -> _State:
        plan = save.frame.plan
        counts = -(-plan.source_nbytes.astype(np.int64)[plan.order] // CHUNK)
        first = np.zeros(len(plan.order), np.int64)
        first[plan.order] = np.cumsum(counts) - counts
        order = np.argsort(save.pointers, kind="stable")
        return cls(save, changed, save.pointers[order].tolist(), order.tolist(), first)

    def stale(self, optimizer: Stepped) -> tuple[list[str], bool]:
        """The keys of the optimizer's parameters, or of arrays in their place, if all are as they were.

        Also whether they are its parameters.
        """
        structure = self.save.structure
        found = [place for address, nbytes in optimizer.places if (place := self._find(address, nbytes)) is not None]
        if found:
            if any(self.changed[begin:end].any() for _, begin, end in found):
                return [], True
            sources = {source for source, _, _ in found}
            return [structure.key(i) for i, one in enumerate(structure.source) if one in sources], True
        # none of its parameters is saved; copies of them may be, in one or several providers
        rows: dict[int, list[int]] = {}
        for i, (provider, _) in enumerate(structure.arrays):
            rows.setdefault(provider, []).append(i)
        twice = optimizer.shapes + optimizer.shapes  # as the states of an optimizer have them
        alike = []
        for of in rows.values():
            shapes = Counter(tuple(structure.arrays[i][1].shape) for i in of)
            if optimizer.shapes <= shapes and not twice <= shapes:
                alike.append(of)
        if any(self._has_changed(structure.source[i]) for of in alike for i in of):
            return [], False
        return [structure.key(i) for of in alike for i in of], False

    def _find(self, address: int, nbytes: int) -> tuple[int, int, int] | None:
        """The buffer that has a range of memory, and its chunks."""
        at = bisect.bisect_right(self.begins, address) - 1
        if at < 0:
            return None
        source, begin = self.order[at], address - self.begins[at]
        if begin + nbytes > int(self.save.frame.plan.source_nbytes[source]):
            return None
        first = int(self.first[source])
        return source, first + begin // CHUNK, first + -(-(begin + nbytes) // CHUNK)

    def _has_changed(self, source: int) -> bool:
        first = int(self.first[source])
        return bool(self.changed[first : first - (-int(self.save.frame.plan.source_nbytes[source]) // CHUNK)].any())


def _should_change(optimizer: Any) -> bool:
    """Whether a step changes parameters: a learning rate is not 0, as far as the host knows it."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    on_host = [rate for rate in rates if str(getattr(rate, "device", "cpu")) == "cpu"]
    return any(float(rate) != 0 for rate in on_host) or not rates


def _described(optimizer: Any) -> Stepped:
    parameters = [_local(p) for group in optimizer.param_groups for p in group["params"]]
    places = [(p.data_ptr(), p.numel() * p.element_size()) for p in parameters if p.numel()]
    return Stepped(type(optimizer).__name__, places, Counter(tuple(p.shape) for p in parameters if p.numel()))


def _local(parameter: Any) -> Any:
    to_local: Callable[[], Any] | None = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
