"""The calls that an untrusted pickle may make: only functions and arguments that the classes' own pickles hold.

A pickle names functions and gives them arguments. A few bytes can ask for terabytes, or make NumPy believe that memory
holds objects. So the functions here check their arguments first, and raise FormatError.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import datetime
import decimal
import fractions
import math
import pathlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from datastates._base.loaded import loaded
from datastates.errors import FormatError
from datastates.state import dtypes


class TorchName:
    """A reference to a torch global, such as an element type, that the reader understands without torch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


def name_in_torch(value: Any) -> str:
    """The name within torch of an element type, a quantization scheme or a class; empty for other values."""
    if isinstance(value, TorchName):
        return value.name
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("torch.")
    kind = type(value)
    is_named = kind.__module__ == "torch" and kind.__name__ in ("dtype", "qscheme")
    return str(value).removeprefix("torch.") if is_named else ""


def torch_if(wanted: bool) -> Any:
    """The module ``torch``; None if it is not wanted, or not installed."""
    if not wanted:
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch


def size(sizes: Any) -> tuple[int, ...]:
    """Make a tuple of sizes, in place of ``torch.Size``, where torch is not installed or not wanted."""
    if not are_sizes(sizes):
        raise FormatError("a shape is not made of sizes")
    return tuple(sizes)


def _rebuild_numpy(subtype: Any, shape: object, kind: object) -> Any:
    _check_rebuild(subtype, np.ndarray, shape, kind)
    return np.ndarray.__new__(subtype, (0,), "b")


def _rebuild_masked(subtype: Any, base: Any, shape: object, kind: object) -> Any:
    _check_rebuild(subtype, np.ma.MaskedArray, shape, kind)
    _check_rebuild(base, np.ndarray, shape, kind)
    data, mask = np.ndarray.__new__(base, (0,), "b"), np.ndarray((0,), "?")
    return subtype.__new__(subtype, data, mask=mask, dtype="b")


def _check_rebuild(subtype: object, base: type, shape: object, kind: object) -> None:
    # NumPy always writes an empty array here, which __setstate__ fills; a larger shape would only allocate memory
    # a subclass of another package gets here only if the caller trusts it
    if not (isinstance(subtype, type) and issubclass(subtype, base)) or shape != (0,) or kind not in (b"b", "b"):
        raise FormatError("a NumPy array is rebuilt with arguments that NumPy does not write")


def _masked_constant() -> Any:
    return np.ma.masked


def _string_dtype(coerce: object, *missing: Any) -> Any:
    """Make NumPy's type of strings of any length; ``missing`` is the object that stands for a missing string."""
    if type(coerce) not in (int, bool) or len(missing) > 1:
        raise FormatError("a NumPy type of strings is made from arguments that NumPy does not write")
    named = {"na_object": missing[0]} if missing else {}
    return np.dtypes.StringDType(coerce=bool(coerce), **named)


def numpy_dtype(*args: Any) -> Any:
    """Make a NumPy dtype from a pickle's arguments; :func:`set_numpy_dtype` completes it."""
    # NumPy writes a name, align=False and copy=True; because of the copy, BUILD changes no dtype of this process
    match args:
        case (str(), False, True):
            return np.dtype(*args)
        case (type() as scalar, False, True) if scalar is np.record or _is_of_ml_dtypes(scalar):
            return np.dtype(*args)
    raise FormatError("a NumPy type is made from arguments that NumPy does not write")


_REGISTERED = 2
"""``isbuiltin`` of the types that a library has registered. NumPy does not copy them: a process has each once."""


def _ml_dtype(name: str) -> Any:
    """The type of ml_dtypes with this name, to make a NumPy dtype from.

    Raises:
        ImportError: ml_dtypes is not installed, or lacks the type.
    """
    try:
        import ml_dtypes

        return getattr(ml_dtypes, name)
    except (ImportError, AttributeError):
        raise ImportError(f"a value is of NumPy's type {name}: install a newer ml_dtypes") from None


def _is_of_ml_dtypes(scalar: type) -> bool:
    return getattr(loaded("ml_dtypes"), scalar.__name__, None) is scalar


_STRINGS = "T"
"""The character code of NumPy's ``StringDType``, whose arguments are all of its state."""


def set_numpy_dtype(dtype: Any, state: Any) -> None:
    """Check and set a dtype's state: NumPy would believe any state, even that a type with objects has none."""
    expected: Any = None
    match state:
        case (3, *form) | (4, *form, dict()):
            expected = _of_form(dtype, form)
        case (4, *form, (None | dict(), (_, int(), int(), int()))) if dtype.kind in "mM":
            expected = _of_form(dtype, form)
    if expected is None or state[1] not in ("<", ">", "|", "=") or dtype.char == _STRINGS:
        raise FormatError("a NumPy type has a state that NumPy does not write")
    size, flags = state[5], state[7]
    if size not in (-1, expected.itemsize) or (flags ^ expected.flags) & 0xFF:
        raise FormatError("a NumPy type states a size or flags that it does not have")
    if dtype.isbuiltin != _REGISTERED:
        dtype.__setstate__(state)
    elif state[1] == ">":
        raise FormatError("a NumPy type of ml_dtypes states another byte order")


def _of_form(dtype: Any, form: list[Any]) -> Any:
    """The type that a dtype's state, without its version and metadata, describes; None for a state of another form."""
    match form:
        case [str(), None, None, None, int(), int(), int()]:
            return dtype
        case [str(), (np.dtype() as base, tuple(shape)), None, None, int(), int(), int()]:
            return np.dtype((base, shape))
        case [str(), None, tuple(names), dict(fields), int(size), int(), int(flags)]:
            return _structured(names, fields, size, align=bool(flags & 0x80))
    return None


def _structured(names: tuple[Any, ...], fields: dict[Any, Any], size: int, *, align: bool) -> Any:
    entries = [fields[n] for n in names]
    titles = [e[2] if len(e) == 3 else None for e in entries]
    known = {*names, *(title for title in titles if title is not None)}
    if fields.keys() != known or not all(len(e) in (2, 3) and isinstance(e[0], np.dtype) for e in entries):
        raise FormatError("a NumPy type has fields without a name of their own")
    form: Any = {"names": names, "formats": [e[0] for e in entries], "offsets": [e[1] for e in entries]}
    if any(title is not None for title in titles):
        form["titles"] = titles
    form["itemsize"] = size
    return np.dtype(form, align=align)


def set_numpy_array(array: Any, state: Any) -> None:
    """Check and set an array's state: NumPy would allocate any shape, and would not count the objects."""
    masked = loaded("numpy.ma")
    match state:
        case (int(), tuple(shape), np.dtype() as dtype, bool(), bytes() | list() as data):
            is_whole = masked is None or not isinstance(array, masked.MaskedArray)
        case (1, tuple(shape), np.dtype() as dtype, bool(), bytes() | list() as data, bytes(mask), fill):
            is_whole = masked is not None and isinstance(array, masked.MaskedArray) and array is not masked.masked
            is_whole = is_whole and len(mask) == math.prod(shape) * masked.make_mask_descr(dtype).itemsize
            is_whole = is_whole and (fill is None or (isinstance(fill, np.ndarray) and fill.shape == ()))
        case _:
            is_whole = False
    if not is_whole:
        raise FormatError("a NumPy array has a state that NumPy does not write")
    if len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise FormatError("a NumPy array has an impossible shape")
    itemsize = 1 if dtype.hasobject else dtype.itemsize
    if isinstance(data, list) != dtype.hasobject or len(data) != math.prod(shape) * itemsize:
        raise FormatError("a NumPy array has other data than its shape says")
    array.__setstate__(state)


def _numpy_from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """Make an array from the arguments that NumPy writes into a pickle of protocol 5."""
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise FormatError("a NumPy array is made from something else than bytes and a type without objects")
    fits = are_sizes(shape) and len(data) == math.prod(shape) * dtype.itemsize
    if not fits or order not in ("C", "F", "K") or not (axes is None or are_sizes(axes)):
        raise FormatError("a NumPy array has other data than its shape says")
    array = np.frombuffer(data, dtype)
    return array.reshape(shape, order=order) if axes is None else array.reshape(shape).transpose(axes)


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    if isinstance(data, np.ndarray) and data.shape == () and data.dtype == dtype and dtype.names is not None:
        return data[()]  # NumPy writes an array of a row with objects
    if isinstance(dtype, np.dtype) and isinstance(data, bytes) and len(data) == dtype.itemsize and not dtype.hasobject:
        return np.frombuffer(data, dtype)[0]
    raise FormatError("a NumPy scalar does not fit its type")


def _encode(text: str, encoding: str) -> bytes:
    if type(text) is not str or type(encoding) is not str or encoding != "latin1":
        raise FormatError("bytes are encoded as something else than latin1")
    return text.encode("latin1")


def _bytearray(*args: Any) -> bytearray:
    if args and not isinstance(args[0], (bytes, str)):
        raise FormatError("a bytearray is built from something else than bytes")
    return bytearray(*args)


_MAX_KEY = 10_000
"""Most parts of one mapping key, nested tuples included: a tuple repeated many levels deep hashes for ever."""


def check_key(key: object) -> None:
    """Raise FormatError for a key of a mapping that would take for ever to hash."""
    left, parts = _MAX_KEY, [key]
    while parts:
        part = parts.pop()
        if isinstance(part, slice):
            part = (part.start, part.stop, part.step)
        elif dataclasses.is_dataclass(part):
            part = tuple(getattr(part, field.name, None) for field in dataclasses.fields(part))
        if isinstance(part, tuple):
            left -= 1 + len(part)
            if left < 0:
                raise FormatError("a key of a mapping or a set is too large")
            parts.extend(part)


def _are_keys(args: Any) -> bool:
    if len(args) == 1 and type(args[0]) is list:
        for key in args[0]:
            check_key(key)
        return True
    return not args


def _are_pairs(value: Any) -> bool:
    """Whether a value is a list of keys with their items, as Python 2 wrote an ordered dict."""
    if type(value) is not list or not all(type(pair) is list and len(pair) == 2 for pair in value):
        return False
    for key, _ in value:
        check_key(key)
    return True


def are_sizes(value: Any) -> bool:
    """Whether a value is a tuple of sizes, as torch writes shapes and strides: at most 64 of them, below 2**62."""
    return isinstance(value, tuple) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**62 for n in value)


_FACTORIES = (
    *(int, float, bool, str, bytes, list, tuple, dict, set, collections.OrderedDict, collections.Counter),
    *(frozenset, complex, collections.deque, collections.defaultdict, decimal.Decimal, fractions.Fraction),
)
_LARGE = 1 << 16
"""Most bits of a fraction's integers: reducing larger ones takes long."""


def _are_of_fraction(args: Any) -> bool:
    if len(args) == 1 and type(args[0]) is str:
        return len(args[0]) < _LARGE // 8 and re.fullmatch(r"-?[0-9]+(/[0-9]+)?", args[0]) is not None
    return len(args) == 2 and all(type(a) is int and a.bit_length() <= _LARGE for a in args)


def _are_of_time(size: int) -> Callable[[Any], bool]:
    """A check of arguments for ``datetime`` classes: ``size`` packed bytes, and perhaps a time zone."""
    return lambda args: (
        0 < len(args) < 3
        and (type(args[0]) is bytes and len(args[0]) == size)
        and (len(args) == 1 or type(args[1]) is datetime.timezone)
    )


def _are_texts(args: Any) -> bool:
    return all(type(a) is str for a in args)


_CALLS: dict[Any, Callable[[Any], bool]] = {
    collections.deque: lambda args: not args or (args[0] == () and all(a is None or type(a) is int for a in args[1:])),
    collections.defaultdict: lambda args: not args or (len(args) == 1 and (args[0] is None or args[0] in _FACTORIES)),
    pathlib.PurePosixPath: _are_texts,
    pathlib.PureWindowsPath: _are_texts,
    pathlib.PosixPath: _are_texts,
    datetime.date: lambda args: _are_of_time(4)(args) and len(args) == 1,
    datetime.time: _are_of_time(6),
    datetime.datetime: _are_of_time(10),
    datetime.timedelta: lambda args: all(type(a) is int for a in args),
    datetime.timezone: lambda args: bool(args) and type(args[0]) is datetime.timedelta and _are_texts(args[1:]),
    decimal.Decimal: lambda args: len(args) == 1 and type(args[0]) is str,
    fractions.Fraction: _are_of_fraction,
    set: _are_keys,
    frozenset: _are_keys,
    collections.OrderedDict: lambda args: not args or (len(args) == 1 and _are_pairs(args[0])),
    collections.Counter: lambda args: not args or (len(args) == 1 and type(args[0]) is dict),
    bytes: lambda args: not args,  # as protocol 2 writes empty ones
    complex: lambda args: all(type(a) in (int, float) for a in args),
    range: lambda args: all(type(a) is int for a in args),
    slice: lambda args: True,
}
"""For each class, a check of the arguments it may be called with."""


_BUILTINS: tuple[type, ...] = (set, frozenset, complex, slice, range, *_FACTORIES[:8])
_STANDARD: tuple[Any, ...] = (
    *(collections.deque, collections.defaultdict, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
)
_PATHS = ("PurePosixPath", "PureWindowsPath", "PosixPath")
SAFE: dict[str, Callable[[], Any]] = {
    **{f"builtins.{c.__name__}": partial(getattr, builtins, c.__name__) for c in _BUILTINS},
    **{f"{c.__module__}.{c.__name__}": partial(lambda c: c, c) for c in _STANDARD},
    **{f"{m}.{c}": partial(getattr, pathlib, c) for m in ("pathlib", "pathlib._local") for c in _PATHS},
    "builtins.bytearray": lambda: _bytearray,
    "collections.OrderedDict": lambda: collections.OrderedDict,
    "collections.Counter": lambda: collections.Counter,
    "_codecs.encode": lambda: _encode,
    "numpy.ndarray": lambda: np.ndarray,
    "numpy.dtype": lambda: numpy_dtype,
    "numpy.record": lambda: np.record,
    **{f"numpy.{m}recarray": lambda: np.recarray for m in ("", "rec.")},
    **{f"numpy.ma.{m}MaskedArray": lambda: np.ma.MaskedArray for m in ("", "core.")},
    "numpy.ma.core.mvoid": lambda: np.ma.core.mvoid,
    "numpy.ma.core.MaskedConstant": lambda: _masked_constant,
    "numpy.ma.core._mareconstruct": lambda: _rebuild_masked,
    "numpy._core._internal._convert_to_stringdtype_kwargs": lambda: _string_dtype,
    **{f"numpy.{m}.multiarray._reconstruct": lambda: _rebuild_numpy for m in ("core", "_core")},
    **{f"numpy.{m}.multiarray.scalar": lambda: _numpy_scalar for m in ("core", "_core")},
    **{f"numpy.{m}.numeric._frombuffer": lambda: _numpy_from_buffer for m in ("core", "_core")},
    **{f"ml_dtypes.{d.name}": partial(_ml_dtype, d.name) for d in dtypes.ALL if d.numpy == d.name},
}
_FUNCTIONS = (
    *(_encode, _bytearray, size, numpy_dtype, _string_dtype, _numpy_scalar),
    *(_rebuild_numpy, _rebuild_masked, _masked_constant, _numpy_from_buffer),
)


def may_call(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether an untrusted pickle may call a function with these arguments."""
    if not isinstance(function, type):
        return any(function is f for f in _FUNCTIONS)
    if function in _CALLS:
        return _CALLS[function](arguments)
    if function.__module__ == "torch" and function.__name__ == "Size":
        return len(arguments) == 1 and are_sizes(arguments[0])
    if function.__module__ == "torch" and function.__name__ == "device":
        return 0 < len(arguments) < 3 and all(type(a) in (str, int) for a in arguments)
    return False
