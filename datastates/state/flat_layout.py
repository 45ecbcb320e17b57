"""Where the elements of parameters lie in one rank's flat tensor. Pure computation, without any framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Name: TypeAlias = str | int
"""A parameter's name, or its number in ``Optimizer.state_dict()``."""

Parameters: TypeAlias = Iterable[tuple[Name, Sequence[int]]]
"""Names and logical shapes of parameters, in the order of the concatenation."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of one parameter that lies in a flat tensor. All numbers count elements.

    Attributes:
        name: The parameter.
        shape: Its logical shape.
        begin: First element of the range, in the parameter flattened in row-major order.
        end: One past the last element of the range.
        at: Where the range begins in the flat tensor.
    """

    name: Name
    shape: tuple[int, ...]
    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class FlatLayout:
    """Which ranges of the logical parameters lie where in one rank's flat tensor. The rest of the tensor is padding.

    :meth:`concatenated` and :meth:`each_split` make the two common layouts. Give any other one slice by slice. The
    slices of all ranks together must hold every element of every parameter exactly once. A parameter without elements
    needs one empty slice on one rank.

    Construction raises ValueError if two parameters share a name, or if a slice belongs to no parameter, overlaps or
    precedes the one before it, or reaches beyond its parameter or the flat tensor.

    Attributes:
        parameters: Names and logical shapes of all parameters that are split together, on any rank, in their order.
        slices: The ranges that this rank holds, in the order of the flat tensor.
        numel: Elements of the flat tensor, padding included.
    """

    parameters: tuple[tuple[Name, tuple[int, ...]], ...]
    slices: tuple[Slice, ...]
    numel: int

    def __post_init__(self) -> None:
        """Check the layout; see the class for errors."""
        shapes = dict(self.parameters)
        if len(shapes) < len(self.parameters):
            names = [name for name, _ in self.parameters]
            raise ValueError(f"two parameters are named {next(n for n in names if names.count(n) > 1)!r}")
        end = 0
        for piece in self.slices:
            if shapes.get(piece.name) != piece.shape:
                raise ValueError(f"a slice of {piece.name!r} is of shape {piece.shape}, which no parameter has")
            if not 0 <= piece.begin <= piece.end <= math.prod(piece.shape):
                raise ValueError(f"{piece.name!r} has no elements {piece.begin} to {piece.end}")
            if piece.at < end:
                raise ValueError(f"the slice of {piece.name!r} lies before the end of another")
            end = piece.at + piece.end - piece.begin
        if end > self.numel:
            raise ValueError(f"the slices reach to {end}, beyond the {self.numel} elements of the flat tensor")

    @classmethod
    def concatenated(cls, parameters: Parameters, rank: int, world_size: int, *, alignment: int = 1) -> FlatLayout:
        """All parameters laid end to end, padded at the end, and cut into one equal partition for each rank.

        Hand-written ZeRO-1 loops do this. DeepSpeed ZeRO-1 and ZeRO-2 do it for each parameter group, with an
        ``alignment`` of 2. DeepSpeed's order is the order of its flat buffer, which ``round_robin_gradients`` changes.

        Args:
            parameters: Names and logical shapes, in the order of the concatenation.
            rank: This rank's number among the ranks that share the parameters.
            world_size: The number of ranks that share the parameters.
            alignment: The length of a partition is a multiple of this, in elements.

        Returns:
            The layout of this rank's partition.

        Raises:
            ValueError: A number is out of its range, or two parameters share a name.
        """
        listed = _listed(parameters, rank, world_size)
        if alignment < 1:
            raise ValueError(f"alignment={alignment}: must be 1 or more")
        total = sum(math.prod(shape) for _, shape in listed)
        partition = -(-total // (alignment * world_size)) * alignment
        first, last = rank * partition, (rank + 1) * partition
        slices = []
        position = 0
        for name, shape in listed:
            numel = math.prod(shape)
            begin, end = max(first, position), min(last, position + numel)
            # a parameter without elements goes where its elements would begin
            owner = min(position // partition, world_size - 1) if partition else 0
            if begin < end or (numel == 0 and owner == rank):
                slices.append(Slice(name, shape, begin - position, end - position, begin - first))
            position += numel
        return cls(listed, tuple(slices), partition)

    @classmethod
    def each_split(cls, parameters: Parameters, rank: int, world_size: int) -> FlatLayout:
        """Each parameter padded by itself and cut into equal partitions; a rank's partitions are laid end to end.

        DeepSpeed ZeRO-3 does this with the parameters of each sub-group.

        Args:
            parameters: Names and logical shapes, in the order of the concatenation.
            rank: This rank's number among the ranks that share the parameters.
            world_size: The number of ranks that share the parameters.

        Returns:
            The layout of this rank's partitions.

        Raises:
            ValueError: A number is out of its range, or two parameters share a name.
        """
        listed = _listed(parameters, rank, world_size)
        slices = []
        at = 0
        for name, shape in listed:
            numel = math.prod(shape)
            partition = -(-numel // world_size)
            begin, end = rank * partition, min((rank + 1) * partition, numel)
            if begin < end or (numel == 0 and rank == 0):
                slices.append(Slice(name, shape, begin, end, at))
            at += partition
        return cls(listed, tuple(slices), at)

    @property
    def owned(self) -> tuple[Name, ...]:
        """Parameters whose first element this rank holds. Every parameter is owned by exactly one rank."""
        return tuple(piece.name for piece in self.slices if piece.begin == 0)

    def runs(self) -> list[tuple[int, int, list[Slice]]]:
        """The ranges of the flat tensor that hold parameters: begin and end in elements, and the slices in each."""
        found: list[tuple[int, int, list[Slice]]] = []
        for piece in self.slices:
            end = piece.at + piece.end - piece.begin
            if found and found[-1][1] == piece.at:
                begin, _, pieces = found.pop()
                pieces.append(piece)
                found.append((begin, end, pieces))
            else:
                found.append((piece.at, end, [piece]))
        return found


def _listed(parameters: Parameters, rank: int, world_size: int) -> tuple[tuple[Name, tuple[int, ...]], ...]:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must be from 0 to world_size - 1, which is {world_size - 1}")
    listed = tuple((name, tuple(shape)) for name, shape in parameters)
    for name, shape in listed:
        if min(shape, default=0) < 0:
            raise ValueError(f"{name!r} has a negative dimension: {shape}")
    return listed
