"""One rank's share of an optimizer state that ranks share out: flat partitions, or whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates._base import gc_pause
from datastates._base.columns import I64
from datastates._base.loaded import loaded
from datastates.errors import ProviderError
from datastates.state import arrays, dtypes
from datastates.state.flat_layout import FlatLayout, Name, Slice
from datastates.state.keys import state_key
from datastates.state.shards import ArrayRef, Buffer, Shard


@dataclass(frozen=True, eq=False)
class Partition:
    """One rank's flat partition of the states of many parameters.

    Attributes:
        layout: Tells where parameters lie in the flat arrays.
        tensors: Arrays that exist independently of the optimizer, by the state's name. Each is one-dimensional and
            contiguous with ``layout.numel`` elements; or it has no dimension, for a number that the whole partition
            shares. The mapping is read at each snapshot, and its arrays are restored in place.
        parameter: The flat tensor that the optimizer steps, and under which it keeps its own states; None if it keeps
            none.
        group: Number of the parameter group, from 0.
    """

    layout: FlatLayout
    tensors: Mapping[str, Any] = field(default_factory=dict)
    parameter: Any = None
    group: int = 0

    @property
    def form(self) -> object:
        """An object that is equal for two shares if they make the same shards of an array: the layout."""
        return self.layout

    @property
    def names(self) -> Sequence[Name]:
        """All parameters of the layout, on any rank."""
        return [name for name, _ in self.layout.parameters]

    @property
    def held(self) -> Sequence[Name]:
        """The parameters that have a slice here; in a partition of padding only, the last of all parameters."""
        return [piece.name for piece in self.layout.slices] or [self.scalar_source]

    @property
    def scalar_source(self) -> Name:
        """The parameter whose stored scalar states a restore takes: the first that has a slice here.

        In a partition of padding only, it is the last of all parameters.
        """
        return self.layout.slices[0].name if self.layout.slices else self.layout.parameters[-1][0]

    def shards(self, state: str, array: Shard) -> list[Shard]:
        """The shards that this rank saves of one state's array, which is described as a whole.

        They are flat ranges, in buffers without padding; for a scalar, one shard for each parameter that begins here.

        Raises:
            ProviderError: The array does not fit the share.
        """
        if array.shape == ():
            return [replace(array, key=state_key(name, state)) for name in self.layout.owned]
        self._check(state, array)
        assert array.buffer is not None
        assert array.dtype is not None
        itemsize = dtypes.BY_NAME[array.dtype].itemsize
        first = array.buffer.pointer + array.buffer_offset
        result = []
        for begin, end, pieces in self.layout.runs():
            buffer = replace(array.buffer, pointer=first + begin * itemsize, nbytes=(end - begin) * itemsize)
            result += [_part(piece, state, array, buffer, (piece.at - begin) * itemsize) for piece in pieces]
        return result

    def destinations(self, state: str, array: Any) -> list[Shard]:
        """The shards through which a restore fills one state's live array.

        They are views of it without its padding; a scalar as it is.

        Raises:
            ProviderError: The array does not fit the share.
        """
        whole = arrays.destination(state_key(self.scalar_source, state), array)
        if whole.shape == ():
            return [whole]
        self._check(state, whole)
        flat = array.detach() if whole.kind == "torch" else array
        views = [flat[piece.at : piece.at + piece.end - piece.begin] for piece in self.layout.slices]
        described = [arrays.destination("", view) for view in views]
        return [_part(p, state, own, own.buffer, 0) for p, own in zip(self.layout.slices, described, strict=True)]

    def is_scalar(self, state: str, stored: Mapping[Name, ArrayRef]) -> bool:
        """Whether a state, such as ``step``, is one number for each parameter, given its stored arrays by parameter.

        A parameter with dimensions tells it. If all stored parameters are numbers themselves, only ``step`` counts.
        """
        for name, shape in self.layout.parameters:
            if shape and name in stored:
                return stored[name].shape == ()
        return state == "step"

    def fresh(self, ref: ArrayRef) -> Any:
        """Make a new array, on the parameter's device, for a state that is no scalar. ``ref`` is its stored array.

        It is zeros for the whole partition: undefined values in the padding could disturb training.
        """
        return self.parameter.detach().new_zeros(self.layout.numel, dtype=_torch_dtype(ref))

    def _check(self, state: str, array: Shard) -> None:
        if array.shape != (self.layout.numel,) or array.stride != (1,):
            raise ProviderError(
                f"{state!r}: an array of shape {array.shape} and strides {array.stride} is no flat partition: "
                f"its layout has {self.layout.numel} contiguous elements"
            )


class WholeParameter(Partition):
    """The states of one parameter, all on one rank, of any shapes. On the other ranks ``parameter`` is None."""

    def __init__(self, name: Name, parameter: Any, group: int) -> None:
        """Take the parameter, or None, under its name, and the number of its group."""
        super().__init__(FlatLayout(((name, ()),), (), 0), {}, parameter, group)

    def shards(self, state: str, array: Shard) -> list[Shard]:
        """The array as one whole shard."""
        return [replace(array, key=state_key(self.scalar_source, state))]

    def destinations(self, state: str, array: Any) -> list[Shard]:
        """The live array as one whole shard."""
        return [arrays.destination(state_key(self.scalar_source, state), array)]

    def is_scalar(self, state: str, stored: Mapping[Name, ArrayRef]) -> bool:
        """Whether the stored array has no dimension."""
        del state
        return stored[self.scalar_source].shape == ()

    def fresh(self, ref: ArrayRef) -> Any:
        """Make an uninitialized array; if it has the parameter's shape, it has the parameter's strides, as in torch."""
        own = self.parameter.detach()
        if ref.shape == tuple(own.shape):
            return loaded("torch").empty_like(own, dtype=_torch_dtype(ref))
        return own.new_empty(ref.shape, dtype=_torch_dtype(ref))


def _part(piece: Slice, state: str, array: Shard, buffer: Buffer | None, buffer_offset: int) -> Shard:
    return replace(
        array,
        key=state_key(piece.name, state),
        shape=(piece.end - piece.begin,),
        stride=(1,),
        global_shape=piece.shape,
        offset=None,
        flat=(piece.begin, piece.end),
        buffer=buffer,
        buffer_offset=buffer_offset,
    )


def _torch_dtype(ref: ArrayRef) -> Any:
    return getattr(loaded("torch"), ref.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The shards that shares make of arrays.

    Attributes:
        whole: The arrays, each described as a whole.
        shards: The shards to save.
        index: For each shard, the number of its array.
    """

    whole: Sequence[Shard]
    shards: tuple[Shard, ...]
    index: I64

    @classmethod
    @gc_pause.paused()
    def of(
        cls, shares: Sequence[Partition], found: Sequence[tuple[int, str, object]], whole: Sequence[Shard]
    ) -> Spread:
        """Ask the shares for their shards.

        Args:
            shares: The shares.
            found: For each array, the number of its share, the name of its state, and the array.
            whole: For each array, its description as a whole.

        Raises:
            ProviderError: An array does not fit its share.
        """
        rows = [
            (i, shard)
            for i, ((number, state, _), described) in enumerate(zip(found, whole, strict=True))
            for shard in shares[number].shards(state, described)
        ]
        return cls(whole, tuple(shard for _, shard in rows), np.array([i for i, _ in rows], np.int64))
