"""A tensor of a checkpoint that is read when it is used, and only the part that is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from datastates.reading.checkpoint import Checkpoint
from datastates.state.index import Index, indexed

_DESCRIBED = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__} | {
    getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")
}
_IMPOSSIBLE = {"__setitem__", "data_ptr", "as_subclass"}


class Unread(torch.Tensor):
    """Stands in for a tensor, or a box of it: ``narrow()`` and slices make smaller ones, all else reads.

    Engines cut the weights of a rank with tensor parallelism out of whole tensors by ``narrow()``. Here that reads what
    the rank needs only. Its shape and type are told without reading. It cannot be written.
    """

    _opened: Checkpoint
    _key: str
    _begin: tuple[int, ...]
    _in_order: bool

    @staticmethod
    def of(opened: Checkpoint, key: str, *, in_order: bool = False) -> Unread:
        """Stand in for a tensor of an opened checkpoint, which must stay open.

        Args:
            opened: The checkpoint.
            key: The full key.
            in_order: Whether tensors are used whole and in order: the next ones are then read ahead.
        """
        shape = opened.shape(key)
        return _made(opened, key, (0,) * len(shape), shape, in_order)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Describe the tensor, cut it, or read it and let torch go on."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIBED:
                return func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            is_own = bool(args) and isinstance(args[0], cls)
            writes = name in _IMPOSSIBLE or (name.endswith("_") and not name.endswith("__"))
            if (is_own and writes) or isinstance(kwargs.get("out"), cls):
                raise TypeError(f"{name}: a tensor of a checkpoint that is read when it is used cannot be changed")
            if func is torch.Tensor.narrow and is_own:
                return args[0]._narrowed(*args[1:], **kwargs)
            if func is torch.Tensor.__getitem__ and is_own:
                cut = args[0]._cut(args[1])
                if cut is not None:
                    return cut
        args, kwargs = tree_map_only(cls, cls._read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub of 2.13 lacks the function
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse what passes by :meth:`__torch_function__`: there is no memory."""
        raise TypeError(f"{func} of a tensor of a checkpoint that has not been read: use clone() of it")

    def _narrowed(self, dim: int, start: Any, length: int) -> Any:
        start, n = int(start), self.size(dim)
        begin = start + n if start < 0 else start
        if not 0 <= begin <= begin + length <= n:
            raise IndexError(f"{self._key!r}: {length} elements from {start} on, of {n} in dimension {dim}")
        index: list[slice] = [slice(None)] * self.dim()
        index[dim] = slice(begin, begin + length)
        return self._cut(tuple(index))

    def _cut(self, index: Index) -> Any:
        """The box that an index chooses, read if it has fewer dimensions; None for an index that chooses no box."""
        try:
            found = indexed(index, tuple(self.shape))
        except (TypeError, ValueError):
            return None
        begin = tuple(a + b for a, b in zip(self._begin, found.begin, strict=True))
        cut = _made(self._opened, self._key, begin, found.size, self._in_order)
        return cut if found.shape == found.size else cut._read().reshape(found.shape)

    def _read(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            box = tuple(slice(b, b + n) for b, n in zip(self._begin, tuple(self.shape), strict=True))
        whole = not any(self._begin) and tuple(s.stop for s in box) == self._opened.shape(self._key)
        in_order = whole and self._in_order
        read: torch.Tensor = self._opened[self._key] if in_order else self._opened.part(self._key, box)
        return read


def _made(opened: Checkpoint, key: str, begin: tuple[int, ...], size: tuple[int, ...], in_order: bool) -> Unread:
    dtype = getattr(torch, opened.dtype(key))
    made = torch.Tensor._make_wrapper_subclass(Unread, size, dtype=dtype, device=torch.device("cpu"))
    made._opened, made._key, made._begin, made._in_order = opened, key, begin, in_order
    return made
