"""Enumerations and dataclasses of the reading program, which an untrusted pickle may build by value and by field.

The classes must be in modules that are imported already. None of their code runs: an enumeration's member is looked up
by its value, and a dataclass's ``__init__``, ``__post_init__`` and ``__setattr__`` are not called.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from types import MemberDescriptorType, ModuleType
from typing import Any

from datastates._base.loaded import loaded
from datastates.errors import FormatError


def find(module: str, name: str) -> type | None:
    """The enumeration or plain dataclass with this name at the top level of an imported module, or None."""
    held = loaded(module)
    # vars(), not getattr(): a module's own __getattr__ may import other modules
    found = vars(held).get(name) if isinstance(held, ModuleType) else None
    if isinstance(found, type) and (found.__module__, found.__qualname__) == (module, name):
        return found if _is_enumeration(found) or is_by_field(found) else None
    return None


def _is_enumeration(kind: type) -> bool:
    return type(kind) is enum.EnumMeta and _of_class(kind, "__reduce_ex__") is vars(enum.Enum)["__reduce_ex__"]


def has_plain_values(kind: type) -> bool:
    """Whether a class is an enumeration whose values are all str, bytes, int, float or tuples of these."""
    return _is_enumeration(kind) and all(_is_plain(m._value_) for m in kind.__members__.values())  # type: ignore[attr-defined]


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in (str, bytes, int, float)


def is_by_field(kind: type) -> bool:
    """Whether a class is a plain dataclass: attributes alone restore an object, without pickling methods of its own."""
    restore = getattr(kind, "__setstate__", None)
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        # dataclass(frozen=True, slots=True) adds a __setstate__ that sets the fields in their order
        and (restore is None or restore.__module__ == dataclasses.__name__)
        and not hasattr(kind, "__del__")
    )


def may_call(kind: type, arguments: tuple[Any, ...]) -> bool:
    """Whether a call only looks up a member of an enumeration, or combines flags.

    Raises:
        FormatError: The enumeration has no such member.
    """
    if not _is_enumeration(kind) or len(arguments) != 1:
        return False
    (value,) = arguments
    if any(type(m._value_) is type(value) and m._value_ == value for m in kind.__members__.values()):  # type: ignore[attr-defined]
        return True
    if type(value) is int and issubclass(kind, enum.Flag):
        return kind._missing_.__module__ == enum.__name__
    raise FormatError(f"{kind.__module__}.{kind.__qualname__} has no member of a stored value")


def set_fields(target: Any, state: Any) -> None:
    """Set the attributes of a new dataclass object to the state in its pickle.

    Raises:
        FormatError: A dataclass does not write such a state, or an attribute would hide one of the class.
    """
    kind = type(target)
    names = [field.name for field in dataclasses.fields(kind)]
    match state:
        case dict():
            slots = {}
        case (None | dict(), dict()):
            state, slots = state[0] or {}, state[1]
        case list() if len(state) == len(names):
            state, slots = {}, dict(zip(names, state, strict=True))
        case _:
            raise FormatError(f"a state for a {kind.__qualname__} that a dataclass does not write")
    for name, value in state.items():
        if type(name) is not str or not _may_be_set(kind, name, names):
            raise FormatError(f"an attribute {name!r} that hides one of the class {kind.__qualname__}")
        target.__dict__[name] = value
    for name, value in slots.items():
        if not isinstance(_of_class(kind, name), MemberDescriptorType):
            raise FormatError(f"no slot {name!r} in the class {kind.__qualname__}")
        object.__setattr__(target, name, value)


def _of_class(kind: type, name: str) -> object:
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)


def _may_be_set(kind: type, name: str, fields: list[str]) -> bool:
    """Whether a name is a field, a cached property or unknown to the class, so that it hides no method."""
    held = _of_class(kind, name)
    return held is None or name in fields or isinstance(held, functools.cached_property)
