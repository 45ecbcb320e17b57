"""Copies objects by pickling them. Refuses, during the save, objects that could be written but not read back."""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.container import pickle_policy
from datastates.errors import ProviderError
from datastates.state.shards import ArrayLeaf

Leaf = Callable[[object], ArrayLeaf | None]


def _check_fraction(value: Any) -> None:
    if not pickle_policy.may_call(Fraction, value.__reduce__()[1]):
        raise pickle.PicklingError("a fraction of integers that large would take too long to read")


def _check_keys(value: Any) -> None:
    for key in value:
        if type(key) in (tuple, slice):
            pickle_policy.check_key(key)


def _check_dtype(value: Any) -> None:
    made, arguments, *state = value.__reduce__()
    if made is np.dtype:
        pickle_policy.set_numpy_dtype(pickle_policy.numpy_dtype(*arguments), *state)


def _sets_its_state_itself(kind: Any) -> bool:
    masked = loaded("numpy.ma")
    usual = [np.ndarray, *([] if masked is None else [masked.MaskedArray])]
    return not any(kind.__setstate__ is base.__setstate__ for base in usual)


_CHECKS: dict[type, Callable[[Any], None]] = {
    Fraction: _check_fraction,
    **dict.fromkeys((set, frozenset, dict, OrderedDict, defaultdict, Counter), _check_keys),
}


def _check(value: object) -> None:
    """Raise PicklingError or FormatError for a value that a reader refuses whatever ``trust`` it is given."""
    kind: Any = type(value)
    if (check := _CHECKS.get(kind)) is not None:
        check(value)
    elif isinstance(value, np.dtype):
        _check_dtype(value)
    elif isinstance(value, np.ndarray) and _sets_its_state_itself(kind):
        raise pickle.PicklingError("its class has a __setstate__ of its own, which no reader calls")
    elif (torch := loaded("torch")) is not None and kind is torch.memory_format:
        raise pickle.PicklingError("files of torch.save hold no memory formats")


class _Freeze(pickle.Pickler):
    """Pickles objects; ``leaf`` may replace tensors and storages in them by leaves, which become shards."""

    def __init__(self, file: io.BytesIO, leaf: Leaf) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._leaf = leaf

    def persistent_id(self, obj: object) -> ArrayLeaf | None:
        _check(obj)
        return self._leaf(obj)


class _Thaw(pickle.Unpickler):
    def persistent_load(self, pid: ArrayLeaf) -> ArrayLeaf:
        return replace(pid)


def _frozen(value: object, leaf: Leaf) -> bytes:
    file = io.BytesIO()
    _Freeze(file, leaf).dump(value)
    data = file.getvalue()
    if copyreg._extension_registry:  # type: ignore[attr-defined]
        for code, argument, _ in pickletools.genops(data):
            if code.name.startswith("EXT"):
                module, name = copyreg._inverted_registry[argument]  # type: ignore[attr-defined]
                raise pickle.PicklingError(
                    f"{module}.{name} is stored as a number (copyreg.add_extension) that only this process knows"
                )
    return data


@dataclass(eq=False)
class Copies:
    """Copies of objects, which are pickled again later, with a leaf for each tensor that is stored as an array.

    Attributes:
        objects: The copies.
    """

    objects: list[object] = field(default_factory=list)
    _leaves: dict[int, ArrayLeaf] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # whose ids are in use

    @classmethod
    def of(cls, objects: list[object], keys: list[str], leaf: Leaf, found: list[Any]) -> Copies:
        """Copy objects. An object that several of them refer to is copied once.

        The copies hold leaves in place of their tensors. Where the objects' own code needs tensors to be built or
        pickled, they hold copies of the tensors.

        Args:
            objects: The objects.
            keys: The key of each object, for messages.
            leaf: Called with each value in the objects. Returns a leaf to store instead of the value, or None.
            found: The list to which ``leaf`` adds an item for each leaf. Items of leaves that are not used are removed.

        Raises:
            ProviderError: An object does not pickle, or could not be read back; the message names its key.
        """
        plain = len(found)
        frozen = _freeze(objects, keys, leaf)
        with_tensors = len(found) > plain
        try:
            copies = cls(_thaw(frozen))
            if with_tensors:
                _frozen(copies.objects, lambda item: item if type(item) is ArrayLeaf else None)
            return copies
        except Exception as error:  # the objects' own code may raise anything
            if not with_tensors:
                raise _unreadable(keys, error) from error
        del found[plain:]
        try:
            copies = cls(_thaw(_freeze(objects, keys, lambda _: None)))
        except ProviderError:
            raise
        except Exception as error:
            raise _unreadable(keys, error) from error
        copies._refer(leaf)
        if not copies._leaves:
            del found[plain:]
        return copies

    def leaf_of(self, item: object) -> ArrayLeaf | None:
        """The leaf of a copied tensor; None for other values."""
        return self._leaves.get(id(item))

    def _refer(self, leaf: Leaf) -> None:
        """Make a leaf for each copied tensor; for none if the objects make other tensors each time they are pickled."""

        def refer(item: object) -> ArrayLeaf | None:
            known = self._leaves.get(id(item))
            if known is None and (known := leaf(item)) is not None:
                self._leaves[id(item)] = known
                self._kept.append(item)
            return known

        _frozen(self.objects, refer)
        count = len(self._leaves)
        _frozen(self.objects, refer)
        if len(self._leaves) != count:
            self._leaves.clear()


def _unreadable(keys: list[str], error: Exception) -> ProviderError:
    return ProviderError(f"{', '.join(map(repr, keys))}: what they pickle cannot be read back: {error}")


def _freeze(objects: list[object], keys: list[str], leaf: Leaf) -> bytes:
    """Pickle objects together; raises ProviderError, which names the key of an object that does not pickle."""
    try:
        return _frozen(objects, leaf)
    except Exception as error:
        for key, item in zip(keys, objects, strict=True):
            vet(key, item, leaf)
        raise ProviderError(f"{', '.join(map(repr, keys))} cannot be pickled together: {error}") from error


def _thaw(data: bytes) -> list[object]:
    """Build the objects that :func:`_freeze` pickled, in this process."""
    made: list[object] = _Thaw(io.BytesIO(data)).load()
    return made


def vet(key: str, item: object, leaf: Leaf = lambda _: None) -> None:
    """Raise ProviderError, which names the key, if an object does not pickle or could not be read back."""
    try:
        _frozen(item, leaf)
    except Exception as cause:  # the object's own code may raise anything
        what = f"{key!r} ({type(item).__name__})" if key else f"the {type(item).__name__}"
        raise ProviderError(f"{what} cannot be pickled: {cause}") from cause
