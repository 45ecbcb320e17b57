"""A state of NumPy arrays that is split over ranks, for tests of several ranks without a framework."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Buffer, Shard


def logical(key: str, shape: tuple[int, ...], dtype: str = "float32", step: int = 0) -> np.ndarray[Any, Any]:
    """A logical tensor's contents: consecutive numbers from a start that depends on the key and the step."""
    start = sum(key.encode()) * 1000 + step * 7
    return (np.arange(math.prod(shape)) + start).astype(dtype).reshape(shape)


def even(n: int, rank: int, ranks: int) -> tuple[int, int]:
    """This rank's range of ``n`` items, chunked as in torch: the last ranks may have fewer items, or none."""
    chunk = -(-n // ranks)
    return min(rank * chunk, n), min((rank + 1) * chunk, n)


class Split(StateProvider):
    """Named parts: boxes ``(offset, shape)`` or flat ranges ``(begin, end)`` of logical tensors.

    Attributes:
        arrays: This rank's live part of each tensor.
    """

    def __init__(
        self,
        name: str,
        parts: dict[str, tuple[tuple[int, ...], str, Any]],
        replicas: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Allocate parts of zeros: for each key the global shape, ``"box"`` or ``"flat"``, and the place."""
        super().__init__(name)
        self._parts = parts
        self._replicas = replicas or {}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        for key, (_, kind, where) in parts.items():
            shape = where[1] if kind == "box" else (where[1] - where[0],)
            self.arrays[key] = np.zeros(shape, np.float32)

    @classmethod
    def rows(cls, name: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Split:
        """Split each tensor's first dimension evenly."""
        return cls.grid(name, shapes, rank, ranks, mesh=(ranks, 1))

    @classmethod
    def columns(cls, name: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Split:
        """Split each tensor's last dimension evenly."""
        return cls.grid(name, shapes, rank, ranks, mesh=(1, ranks))

    @classmethod
    def planes(cls, name: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Split:
        """Split each tensor's last but one dimension evenly. Each tensor has two dimensions at least."""
        parts = {}
        for key, shape in shapes.items():
            offset, size, d = [0] * len(shape), list(shape), len(shape) - 2
            begin, end = even(shape[d], rank, ranks)
            offset[d], size[d] = begin, end - begin
            parts[key] = (shape, "box", (tuple(offset), tuple(size)))
        return cls(name, parts)

    @classmethod
    def grid(
        cls,
        name: str,
        shapes: dict[str, tuple[int, ...]],
        rank: int,
        ranks: int,
        mesh: tuple[int, int] | None = None,
    ) -> Split:
        """Split the first dimension over a mesh's rows, and the last over its columns.

        A tensor of one dimension is split over the rows, or over the columns if the mesh has one row. Ranks along a
        dimension of the mesh over which a tensor is not split hold it alike.
        """
        down = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
        down, across = mesh or (down, ranks // down)
        i, j = divmod(rank, across)
        parts, replicas = {}, {}
        for key, shape in shapes.items():
            offset, size = [0] * len(shape), list(shape)
            splits = [(0, i, down)] if down > 1 else []
            splits += [(len(shape) - 1, j, across)] if across > 1 and (len(shape) > 1 or down == 1) else []
            for d, at, n in splits if shape else ():
                a, b = even(shape[d], at, n)
                offset[d], size[d] = a, b - a
            parts[key] = (shape, "box", (tuple(offset), tuple(size)))
            if not shape:
                replicas[key] = tuple(range(ranks))
            elif down > 1 and across > 1 and len(shape) == 1:
                replicas[key] = tuple(range(i * across, (i + 1) * across))
        return cls(name, parts, replicas if ranks > 1 else {})

    @classmethod
    def whole(cls, name: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Split:
        """Give every rank all of each tensor."""
        parts: dict[str, Any] = {key: (shape, "box", ((0,) * len(shape), shape)) for key, shape in shapes.items()}
        everybody = tuple(range(ranks)) if ranks > 1 else ()
        return cls(name, parts, dict.fromkeys(shapes, everybody))

    @classmethod
    def mixed(cls, name: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Split:
        """Split the tensors by several layouts, one after the other."""
        made = [layout("", shapes, rank, ranks) for layout in (cls.rows, cls.ranges, cls.columns, cls.whole)]
        chosen = {key: made[i % len(made)] for i, key in enumerate(shapes)}
        parts = {key: split._parts[key] for key, split in chosen.items()}
        return cls(name, parts, {k: s._replicas[k] for k, s in chosen.items() if k in s._replicas})

    @classmethod
    def ranges(cls, name: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Split:
        """Flatten all tensors end to end, and split them evenly, as ZeRO does."""
        total = sum(math.prod(s) for s in shapes.values())
        a, b = even(total, rank, ranks)
        parts: dict[str, tuple[tuple[int, ...], str, Any]] = {}
        at = 0
        for key, shape in shapes.items():
            n = math.prod(shape)
            begin, end = max(a - at, 0), min(b - at, n)
            parts[key] = (shape, "flat", (min(begin, n), max(end, min(begin, n))))
            at += n
        return cls(name, parts)

    @classmethod
    def replicas(cls, name: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> Split:
        """Give every rank each whole tensor, as replicas even for one rank."""
        parts = {key: (shape, "box", ((0,) * len(shape), shape)) for key, shape in shapes.items()}
        return cls(name, parts, dict.fromkeys(shapes, tuple(range(ranks))))

    def drop(self, key: str) -> None:
        """Forget a part."""
        del self.arrays[key], self._parts[key]

    def _part_of(self, key: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        _, kind, where = self._parts[key]
        if kind == "flat":
            return value.ravel()[where[0] : where[1]]
        return value[tuple(slice(o, o + n) for o, n in zip(*where, strict=True))]

    def fill(self, step: int) -> Split:
        """Give the parts the contents of a step."""
        for key, array in self.arrays.items():
            array[...] = self._part_of(key, logical(key, self._parts[key][0], step=step))
        return self

    def wrong(self, step: int) -> list[str]:
        """The keys of the parts that do not have the contents of a step."""
        expected = {key: self._part_of(key, logical(key, self._parts[key][0], step=step)) for key in self.arrays}
        return [key for key, array in self.arrays.items() if not np.array_equal(array, expected[key])]

    def shards(self) -> Sequence[Shard]:
        """One shard for each part."""
        found = []
        for key, (shape, kind, where) in self._parts.items():
            array = self.arrays[key]
            found.append(
                Shard(
                    key=key,
                    dtype="float32",
                    kind="numpy",
                    shape=array.shape,
                    stride=tuple(n // 4 for n in array.strides),
                    global_shape=shape,
                    offset=where[0] if kind == "box" else None,
                    flat=where if kind == "flat" else None,
                    replicas=self._replicas.get(key, ()),
                    lazy=True,
                    buffer=Buffer(array.ctypes.data, array.nbytes, owner=array),
                    source=array,
                )
            )
        return found

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """All parts that are stored, whichever ranks stored them."""
        shards = self.shards()
        stored = saved.arrays()
        saved.report(missing=[s.key for s in shards if s.key not in stored])
        return [s for s in shards if s.key in stored]
