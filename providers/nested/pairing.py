"""Compares a stored value with a live one: finds the arrays that belong together, and the differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from datastates.container.unbuilt import Unbuilt
from datastates.state import arrays, dtypes, nested, sharded_tensors
from datastates.state.keys import join
from datastates.state.shards import ArrayRef

_UNORDERED = (set, frozenset)


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal, where a NaN equals another NaN; False if they cannot be compared."""
    if type(a) is not type(b):
        return False
    if a is b:
        return True
    try:
        return _same(a, b)
    except Exception:  # the objects' own comparison may raise anything
        return False


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, _UNORDERED):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, dict):
        found = [own_key(b, key) for key in a]
        return len(a) == len(b) and all(
            k is not None and same(a[key], b[k[0]]) for key, k in zip(a, found, strict=True)
        )
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and all(map(same, a.ravel().tolist(), b.ravel().tolist()))
    if _is_nan(a):
        return _is_nan(b)
    return bool(a == b)


def _is_nan(value: Any) -> bool:
    """Whether a number is a NaN. A signaling NaN of ``Decimal`` raises an error if it is compared, so it is asked."""
    is_nan = getattr(value, "is_nan", None)
    return bool(is_nan()) if is_nan is not None else bool(value != value)


def own_key(mapping: Mapping[Any, Any], key: Any) -> tuple[Any] | None:
    """The mapping's own key that is the same as ``key``, in a tuple of one item; None if there is none."""
    if key in mapping:
        return (key,)
    if isinstance(key, (str, int)):
        return None
    return next(((own,) for own in mapping if same(own, key)), None)


@dataclass
class Differences:
    """The findings of :func:`pair`. Keys are keys within the provider.

    Attributes:
        pairs: Arrays that both values have: the stored array's reference, and the live array.
        sharded: The live ShardedTensors of stored arrays.
        missing: Keys that only the live value has.
        unexpected: Keys that only the stored value has.
        mismatched: Keys of other differences, each with the difference as text.
        leaves: Leaves, other than arrays, that both values have: key, stored leaf, live leaf.
        added: Live values that this rank's stored value lacks: path, live value, and the keys of the arrays in it that
            other ranks stored.
    """

    pairs: list[tuple[ArrayRef, object]] = field(default_factory=list)
    sharded: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    leaves: list[tuple[str, object, object]] = field(default_factory=list)
    added: list[tuple[tuple[object, ...], object, list[str]]] = field(default_factory=list)


def pair(stored: object, live: object, known: Mapping[str, ArrayRef]) -> Differences:
    """Compare a stored value with a live one, container by container.

    Args:
        stored: The stored value, with an ArrayRef for each array.
        live: The live value.
        known: The stored arrays of all ranks, by key.
    """
    walk = _Walk(known)
    walk.on(stored, live, "", ())
    return walk.found


class _Walk:
    """A walk through both values side by side.

    It is a class because a recursive closure would keep both values alive until garbage is collected.
    """

    def __init__(self, known: Mapping[str, ArrayRef]) -> None:
        self.found = Differences()
        self._known = known
        self._seen: set[tuple[int, int]] = set()

    def on(self, s: Any, v: Any, key: str, path: tuple[object, ...]) -> None:
        found = self.found
        if type(s) is ArrayRef:
            self._meet(s, v, key)
        elif (id(s), id(v)) in self._seen:
            return
        elif isinstance(s, dict) and isinstance(v, dict):
            self._seen.add((id(s), id(v)))
            for k in v:
                if own_key(s, k) is None:
                    self._seek(v[k], join(key, k), (*path, k))
            for k, item in s.items():
                if (own := own_key(v, k)) is None:
                    found.unexpected.append(join(key, k))
                elif type(item) is ArrayRef:  # a shortcut, as there may be very many references
                    self._meet(item, v[own[0]], join(key, k))
                else:
                    self.on(item, v[own[0]], join(key, k), (*path, k))
        elif isinstance(v, (list, tuple)) and isinstance(s, (list, tuple, Unbuilt)):
            s = s.arguments if isinstance(s, Unbuilt) else s
            self._seen.add((id(s), id(v)))
            found.unexpected += [join(key, i) for i in range(len(v), len(s))]
            for i in range(len(s), len(v)):
                self._seek(v[i], join(key, i), (*path, i) if type(s) is list else None)
            for i in range(min(len(s), len(v))):
                self.on(s[i], v[i], join(key, i), (*path, i))
        elif arrays.kind_of(v) is not None:
            found.mismatched[key] = "no array in the checkpoint, one in the live state"
        elif isinstance(s, nested.CONTAINERS) or isinstance(v, nested.CONTAINERS):
            found.mismatched[key] = f"{type(s).__name__} in the checkpoint, {type(v).__name__} in the live state"
        else:
            found.leaves.append((key, s, v))

    def _meet(self, s: ArrayRef, v: object, key: str) -> None:
        if sharded_tensors.is_sharded(v):
            self.found.sharded[key] = v
        elif arrays.kind_of(v) is None:
            self.found.mismatched[key] = f"an array in the checkpoint, none in the live state: {dtypes.described(v)}"
        else:
            # several keys may share memory: the reference may then have another of their keys
            self.found.pairs.append((replace(s, key=key) if s.key != key and key in self._known else s, v))

    def _seek(self, v: Any, key: str, path: tuple[object, ...] | None) -> None:
        """Look for a live value, which the stored value lacks, among the arrays of other ranks.

        Without a path the live value cannot be added to the stored one: it is missing.
        """
        leaves = [(k, leaf) for k, leaf in nested.leaves(v, key) if not isinstance(leaf, nested.CONTAINERS)]
        held = [k for k, leaf in leaves if path is not None and arrays.kind_of(leaf) is not None and k in self._known]
        if path is not None:
            self.found.added.append((path, v, held))
        if not held:
            self.found.missing.append(key)
            return
        for k, leaf in leaves:
            if arrays.kind_of(leaf) is not None and k in self._known:
                self.found.pairs.append((self._known[k], leaf))
            else:
                self.found.missing.append(k)


def add(value: Any, path: tuple[Any, ...], item: object) -> None:
    """Put an item at a path inside ``value``. Missing dicts are made, and an index one past a list's end appends."""
    *above, last = path
    for k in above:
        value = value.setdefault(k, {}) if isinstance(value, dict) else value[k]
    if isinstance(value, list) and last == len(value):
        value.append(item)
    else:
        value[last] = item
