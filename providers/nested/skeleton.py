"""The containers of a nested value without their contents. A value of the same structure is split quickly by them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datastates.state import arrays, tensor_scan
from datastates.state.depth import DEEPEST
from datastates.state.keys import join
from datastates.state.nested import items

_ARRAY, _PLAIN = object(), object()
_NO_ATTRIBUTES: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class _Container:
    """One dict, list or tuple.

    Attributes:
        kind: The type of the container.
        keys: The keys of a dict; the length of a list or tuple.
        children: For each item :data:`_ARRAY`, :data:`_PLAIN` or a container.
        all: The child, if all children are :data:`_ARRAY`, or all are :data:`_PLAIN`; else None.
        attributes: The attributes of an OrderedDict, which must be dicts and plain values.
    """

    kind: type
    keys: list[Any] | int
    children: list[Any]
    all: object
    attributes: dict[str, Any]


class Skeleton:
    """The dicts, lists and tuples of a value of arrays and plain values, without these. Immutable.

    Attributes:
        keys: The arrays' keys, in the order of a walk through the containers.
    """

    def __init__(self, root: _Container, keys: list[str], plain: Callable[[object], bool]) -> None:
        """Keep the parts. Use :meth:`of` to make a skeleton."""
        self._root = root
        self._form = _form(root)
        self.keys = keys
        self._plain = plain

    @classmethod
    def of(cls, value: object, plain: Callable[[object], bool]) -> Skeleton | None:
        """The skeleton of a value; None if it holds anything else, or the same dict or list twice.

        Args:
            value: The value.
            plain: Tells whether a value that is neither a container nor an array is plain, and needs no copy.
        """
        keys: list[str] = []
        seen: set[int] = set()

        def build(item: Any, key: str, depth: int) -> _Container | None:
            if depth > DEEPEST or id(item) in seen or type(item) not in (dict, OrderedDict, list, tuple):
                return None
            if type(item) is not tuple:  # tuples are immutable: one that occurs twice may become two
                seen.add(id(item))
            is_mapping = isinstance(item, dict)
            if is_mapping and not all(map(is_plain_key, item)):
                return None
            children: list[Any] = []
            for k, child in items(item):
                child_key = join(key, k)
                if arrays.kind_of(child) is not None:
                    keys.append(child_key)
                    children.append(_ARRAY)
                elif plain(child):
                    children.append(_PLAIN)
                else:
                    children.append(build(child, child_key, depth + 1))
                    if children[-1] is None:
                        return None
            attributes = attributes_of(item)
            if not _is_all_plain(attributes, plain):
                return None
            kinds = set(children)
            uniform = kinds.pop() if len(kinds) == 1 and kinds <= {_ARRAY, _PLAIN} else None
            shape = list(item) if is_mapping else len(item)
            return _Container(type(item), shape, children, uniform, copy.deepcopy(attributes))

        root = build(value, "", 1)
        return None if root is None else cls(root, keys, plain)

    def strip(self, value: object) -> tuple[list[Any], list[Any]] | None:
        """The arrays and the plain values of a value, each in the order of the walk; None if its structure differs.

        Any value at the place of an array is returned among the arrays: the caller checks it.
        """
        return tensor_scan.split(self._form, value, self._plain)

    def clothe(self, leaves: Sequence[object], plain: Sequence[object]) -> object:
        """Reverse :meth:`strip`: put leaves, which stand for arrays, and plain values into new containers."""
        return _clothe(self._root, iter(leaves), iter(plain))


def _form(bones: _Container) -> tuple[Any, ...]:
    """A container in the form that :func:`~datastates.state.tensor_scan.split` takes."""
    marks: dict[object, bool | None] = {_ARRAY: None, _PLAIN: True}
    inside = [_form(child) if isinstance(child, _Container) else marks[child] for child in bones.children]
    return bones.kind, bones.keys, inside if bones.all is None else marks[bones.all], bones.attributes


def _clothe(bones: _Container, leaves: Iterator[object], plain: Iterator[object]) -> object:
    inside = [
        next(leaves) if child is _ARRAY else next(plain) if child is _PLAIN else _clothe(child, leaves, plain)
        for child in bones.children
    ]
    if not isinstance(bones.keys, list):
        return bones.kind(inside)
    made = bones.kind(zip(bones.keys, inside, strict=True))
    if bones.attributes:
        vars(made).update(bones.attributes)
    return made


def is_plain_key(key: object) -> bool:
    """Whether a mapping's key is a string, or an integer of at most 64 bits. Such keys have a name and are readable."""
    return type(key) is str or (type(key) is int and key.bit_length() <= 64)


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an OrderedDict, such as ``_metadata`` of a ``state_dict()``; empty for other values."""
    return vars(value) if type(value) is OrderedDict else _NO_ATTRIBUTES


def _is_all_plain(value: object, plain: Callable[[object], bool]) -> bool:
    if type(value) is dict or (type(value) is OrderedDict and not vars(value)):
        return all(plain(k) and _is_all_plain(v, plain) for k, v in value.items())
    return plain(value)
