"""What one rank holds of an optimizer state that ranks share out: flat partitions, or whole parameters."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datastates.errors import ProviderError
from datastates.providers.optimizer.flat_layout import FlatLayout, Name, Slice
from datastates.state import arrays, dtypes
from datastates.state.keys import component
from datastates.state.shards import ArrayRef, Buffer, Shard


def key_of(name: Name, state: str) -> str:
    """The key of one state of one parameter: where a nested optimizer state dict has it, too."""
    return f"state/{component(name)}/{component(state)}"


class Share(ABC):
    """Arrays that the optimizer knows by one parameter, and what they are of the logical states.

    Attributes:
        tensors: Arrays that are always there, by the state's name.
        parameter: What the optimizer knows all other states by; None when there are none.
        group: Number of its parameter group.
    """

    tensors: Mapping[str, Any]
    parameter: Any
    group: int

    @property
    @abstractmethod
    def names(self) -> Sequence[Name]:
        """The logical parameters, of this rank or not, whose states are shared out together."""

    @property
    @abstractmethod
    def held(self) -> Sequence[Name]:
        """Those of them that it has elements of, or at least the one whose scalars it takes."""

    @property
    @abstractmethod
    def form(self) -> object:
        """Equal for two shares that make the same shards of an array."""

    @property
    @abstractmethod
    def scalar_source(self) -> Name:
        """The parameter whose scalars are taken on restore."""

    @abstractmethod
    def shards(self, state: str, array: Shard) -> list[Shard]:
        """Of one state's array, described as a whole: what this rank is to save.

        Raises:
            ProviderError: The array is not of the share's form.
        """

    @abstractmethod
    def destinations(self, state: str, array: Any) -> list[Shard]:
        """Of one state's live array: what to restore into it.

        Raises:
            ProviderError: The array is not of the share's form.
        """

    @abstractmethod
    def is_scalar(self, state: str, stored: Mapping[Name, ArrayRef]) -> bool:
        """Whether a state that is stored for these parameters has one number for each."""

    @abstractmethod
    def fresh(self, ref: ArrayRef) -> Any:
        """A new array for a state that is stored so and is not a scalar, where the optimizer wants it."""


@dataclass(frozen=True, eq=False)
class Partition(Share):
    """One rank's flat partition of the states of many parameters.

    Attributes:
        layout: What lies where in the flat arrays.
        tensors: Arrays that are always there, by the state's name: one-dimensional and contiguous, of ``layout.numel``
            elements; or of no dimension, for a number that all of the partition has in common. Asked at each snapshot,
            and restored in place.
        parameter: The flat tensor by which the optimizer knows its own states of the partition.
        group: Number of its parameter group.
    """

    layout: FlatLayout
    tensors: Mapping[str, Any] = field(default_factory=dict)
    parameter: Any = None
    group: int = 0

    @property
    def form(self) -> object:
        """The layout."""
        return self.layout

    @property
    def names(self) -> Sequence[Name]:
        """All parameters of the layout."""
        return [name for name, _ in self.layout.parameters]

    @property
    def held(self) -> Sequence[Name]:
        """Those with a slice here; of a partition of padding only, the last of all."""
        return [piece.name for piece in self.layout.slices] or [self.scalar_source]

    @property
    def scalar_source(self) -> Name:
        """The first parameter that the partition has elements of; in one of padding only, the last of all."""
        return self.layout.slices[0].name if self.layout.slices else self.layout.parameters[-1][0]

    def shards(self, state: str, array: Shard) -> list[Shard]:
        """Flat ranges that lie in buffers without padding; a scalar for each parameter that begins here."""
        if array.shape == ():
            return [replace(array, key=key_of(name, state)) for name in self.layout.owned]
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
        """Views of the live array, without its padding."""
        whole = arrays.destination(key_of(self.scalar_source, state), array)
        if whole.shape == ():
            return [whole]
        self._check(state, whole)
        flat = array.detach() if whole.kind == "torch" else array
        views = [flat[piece.at : piece.at + piece.end - piece.begin] for piece in self.layout.slices]
        described = [arrays.destination("", view) for view in views]
        return [_part(p, state, own, own.buffer, 0) for p, own in zip(self.layout.slices, described, strict=True)]

    def is_scalar(self, state: str, stored: Mapping[Name, ArrayRef]) -> bool:
        """What has no dimension although its parameter has some; of parameters without any, what torch calls step."""
        for name, shape in self.layout.parameters:
            if shape and name in stored:
                return stored[name].shape == ()
        return state == "step"

    def fresh(self, ref: ArrayRef) -> Any:
        """Zeros for all of the partition: padding must not hold what training would trip over."""
        return self.parameter.detach().new_zeros(self.layout.numel, dtype=_torch_dtype(ref))

    def _check(self, state: str, array: Shard) -> None:
        if array.shape != (self.layout.numel,) or array.stride != (1,):
            raise ProviderError(
                f"{state!r}: an array of shape {array.shape} and strides {array.stride} is no flat partition: "
                f"its layout has {self.layout.numel} contiguous elements"
            )


@dataclass(frozen=True, eq=False)
class WholeParameter(Share):
    """The states of one parameter that one rank has whole, each of whatever shape; no ``parameter``: another rank."""

    name: Name
    parameter: Any
    group: int
    tensors: Mapping[str, Any] = field(default_factory=dict, init=False)

    @property
    def form(self) -> object:
        """The name."""
        return self.name

    @property
    def names(self) -> Sequence[Name]:
        """The one."""
        return [self.name]

    @property
    def held(self) -> Sequence[Name]:
        """The one."""
        return [self.name]

    @property
    def scalar_source(self) -> Name:
        """The one."""
        return self.name

    def shards(self, state: str, array: Shard) -> list[Shard]:
        """The array as it is."""
        return [replace(array, key=key_of(self.name, state))]

    def destinations(self, state: str, array: Any) -> list[Shard]:
        """The array as it is."""
        return [arrays.destination(key_of(self.name, state), array)]

    def is_scalar(self, state: str, stored: Mapping[Name, ArrayRef]) -> bool:
        """What has no dimension."""
        del state
        return stored[self.name].shape == ()

    def fresh(self, ref: ArrayRef) -> Any:
        """An array like the parameter, strides included, where it is of the same shape, as torch itself makes it."""
        own = self.parameter.detach()
        if ref.shape == tuple(own.shape):
            return sys.modules["torch"].empty_like(own, dtype=_torch_dtype(ref))
        return own.new_empty(ref.shape, dtype=_torch_dtype(ref))


def _part(piece: Slice, state: str, array: Shard, buffer: Buffer | None, buffer_offset: int) -> Shard:
    return replace(
        array,
        key=key_of(piece.name, state),
        shape=(piece.end - piece.begin,),
        stride=(1,),
        global_shape=piece.shape,
        offset=None,
        flat=(piece.begin, piece.end),
        buffer=buffer,
        buffer_offset=buffer_offset,
    )


def _torch_dtype(ref: ArrayRef) -> Any:
    return getattr(sys.modules["torch"], ref.dtype)
