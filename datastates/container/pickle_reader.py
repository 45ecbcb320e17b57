"""Reads ``data.pkl`` without running code from it: it makes only vetted calls.

Needs no torch. :mod:`datastates.container.pickle_writer` writes such pickles.
"""

from __future__ import annotations

import _compat_pickle
import collections
import datetime
import importlib
import operator
import pickle
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from datastates.container import own_classes, pickle_policy, pickle_torch
from datastates.container.pickle_tensors import REBUILDS, UNTYPED, TensorReader
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError, TrustError
from datastates.state import dtypes
from datastates.state.shards import StoredArray

Trust = Collection[str] | str
"""The classes that objects in a checkpoint may have, as ``module.qualname``; ``"all"`` for any class."""
_TIMES: tuple[Any, ...] = (datetime.datetime, datetime.time)
"""Classes that take a time zone as their last argument."""
_STORAGES = {*dtypes.BY_STORAGE, *pickle_torch.QUANTIZED}
_VALUES = {*dtypes.TORCH, *pickle_torch.VALUES}
_NAMES_OF_PYTHON_3 = 3
"""The protocol from which on a pickler writes names as they are. Before, it writes names of Python 2."""
_CLASSES = (
    "torch.Tensor",
    "torch.Size",
    "torch.device",
    "torch.nn.parameter.Parameter",
    f"torch.{pickle_torch.JAGGED}",
)
"""Classes of torch that a pickle may hold as values."""


class _Reader(TensorReader):
    def load_reduce(self) -> None:
        self.charge(2)
        function, args = self.stack[-2:]
        if type(args) is not tuple:
            raise FormatError("a call without a tuple of arguments")
        if args and isinstance(args[0], type) and issubclass(args[0], Unbuilt):
            function = self.stack[-2] = args[0]  # for example an array subclass, which stays unbuilt
        elif function in _TIMES and isinstance(args[-1], Unbuilt):
            function = self.stack[-2] = type(args[-1])
        foreign = id(function) in self._foreign
        if not self._may_call(function, args):
            raise FormatError("a call of a function that may not be called, or not with these arguments")
        super().load_reduce()
        if foreign:
            self._own(self.stack[-1])

    def load_newobj(self) -> None:
        kind, arguments = self.stack[-2:]
        foreign = id(kind) in self._foreign
        if not foreign and not (isinstance(kind, type) and own_classes.is_by_field(kind) and arguments == ()):
            raise FormatError("an object of an untrusted class that is not a plain dataclass made without arguments")
        super().load_newobj()
        if foreign:
            self._own(self.stack[-1])

    def load_newobj_ex(self) -> None:
        if id(self.stack[-3]) not in self._foreign:
            raise FormatError("an object of an untrusted class that is made with arguments by name")
        super().load_newobj_ex()
        self._own(self.stack[-1])

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        kind = type(target)
        if kind is collections.OrderedDict and type(state) is dict:
            super().load_build()
        elif issubclass(kind, np.ndarray):
            pickle_policy.set_numpy_array(target, self.stack.pop())
        elif issubclass(kind, np.dtype):
            pickle_policy.set_numpy_dtype(target, self.stack.pop())
        elif pickle_torch.is_generator(target):
            pickle_torch.set_generator(target, self.stack.pop())
        elif id(target) in self._foreign and not isinstance(target, type):
            super().load_build()
        elif own_classes.is_by_field(kind):
            own_classes.set_fields(target, self.stack.pop())
        else:
            raise FormatError(f"a state for a {kind.__name__}, which has none")

    def _check_target(self, target: Any, kind: type | tuple[type, ...]) -> None:
        if not isinstance(target, kind) and (id(target) not in self._foreign or isinstance(target, type)):
            raise FormatError(f"items for a {type(target).__name__}, which takes none")

    def load_append(self) -> None:
        self._check_target(self.stack[-2], (list, collections.deque))
        super().load_append()

    def load_appends(self) -> None:
        self._check_target(self.metastack[-1][-1], (list, collections.deque))
        super().load_appends()

    def load_setitem(self) -> None:
        self._check_target(self.stack[-3], dict)
        pickle_policy.check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_target(self.metastack[-1][-1], dict)
        for key in self.stack[::2]:
            pickle_policy.check_key(key)
        super().load_setitems()

    def load_additems(self) -> None:
        self._check_target(self.metastack[-1][-1], set)
        for item in self.stack:
            pickle_policy.check_key(item)
        super().load_additems()

    def load_frozenset(self) -> None:
        for item in self.stack:
            pickle_policy.check_key(item)
        super().load_frozenset()

    dispatch = {  # noqa: RUF012 - as the base class's; a dispatch table holds functions, not names
        **TensorReader.dispatch,
        **{
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.NEWOBJ_EX[0]: load_newobj_ex,
            pickle.BUILD[0]: load_build,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.ADDITEMS[0]: load_additems,
            pickle.FROZENSET[0]: load_frozenset,
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        if self.proto < _NAMES_OF_PYTHON_3:
            module, name = _compat_pickle.NAME_MAPPING.get(
                (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
            )
        full = f"{module}.{name}"
        if full in pickle_policy.SAFE:
            return pickle_policy.SAFE[full]()
        if full in REBUILDS:
            return getattr(self, REBUILDS[full])
        in_torch = module.partition(".")[0] == "torch"  # the module of a device has classes of its storages, too
        if (module, name) == ("torch.storage", UNTYPED) or (in_torch and name in _STORAGES):
            return pickle_policy.TorchName(name)
        if module == "torch" and name in _VALUES:
            return pickle_policy.TorchName(name) if self._is_type_of_array() else self._of_torch(name)
        if full in _CLASSES:
            return self._of_torch(full.removeprefix("torch."))
        trusted = self.trust == "all" or full in self.trust
        if trusted or full in pickle_torch.BUILT_LATE or full in self._declared():
            return self._other_class(module, name)
        own = own_classes.find(module, name)
        if own is not None:
            return self._own_class(own)
        raise TrustError(full)

    def _declared(self) -> dict[str, Any]:
        return pickle_torch.declared() if self._with_torch else {}

    def _is_type_of_array(self) -> bool:
        """Whether the element type that is being looked up belongs to an array, and nothing else refers to it.

        It is then the last argument, and is not put into the memo.
        """
        at = self.at()
        above = self.metastack[-1] if self.metastack else ()
        return self.data[at : at + 1] == pickle.TUPLE and above[-1:] == [self._rebuild_tensor_v3]

    def _of_torch(self, name: str) -> Any:
        """The value or class of torch with this name; without torch, its stand-in."""
        if (torch := pickle_policy.torch_if(self._with_torch)) is not None:
            return operator.attrgetter(name)(torch)
        if name == "device":
            return self._other_class("torch", name)
        return pickle_policy.size if name == "Size" else pickle_policy.TorchName(name)

    def _own_class(self, kind: type) -> type:
        return kind

    def _other_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module.partition(".")[0] == "torch":
            self._need_torch(full)
        if full in pickle_torch.BUILT_LATE:
            return pickle_torch.BUILT_LATE[full]
        if (safe := self._declared().get(full)) is not None:
            return self._own(safe)
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise FormatError(f"{full} is trusted but cannot be imported: {error}") from error
        return self._own(found)

    def _may_call(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        if self._is_rebuild(function) or id(function) in self._foreign or pickle_policy.may_call(function, arguments):
            return True
        if any(function is late for late in pickle_torch.BUILT_LATE.values()):
            return True
        if isinstance(function, type) and own_classes.may_call(function, arguments):
            return True
        if not arguments or id(arguments[-1]) not in self._foreign:
            return False
        # the last argument came through trust
        if function in _TIMES:
            return len(arguments) == 2 and pickle_policy.may_call(function, arguments[:1])
        return function is collections.defaultdict and len(arguments) == 1


class _Surveyor(_Reader):
    """Reads containers and plain values. Leaves all other objects unbuilt, even if no reader could build them."""

    complete = True

    def _unbuilt(self, name: str, *arguments: Any) -> Any:
        self.complete = False
        return self._own(self._own(type(name, (Unbuilt,), {}))(*arguments))

    def load_reduce(self) -> None:
        function, arguments = self.stack[-2:]
        known = self._is_rebuild(function)  # arguments that such a function refuses are damage
        below = len(self.stack) - 2
        try:
            super().load_reduce()
        except FormatError:
            if known or type(arguments) is not tuple:
                raise
            del self.stack[below:]
            self.append(self._unbuilt(getattr(function, "__name__", "call"), *arguments))

    def load_build(self) -> None:
        below = len(self.stack) - 2
        try:
            super().load_build()
        except FormatError:
            del self.stack[below:]
            self.append(self._unbuilt("state"))

    def persistent_load(self, pid: Any) -> Any:
        try:
            return super().persistent_load(pid)
        except FormatError:
            return self._unbuilt("storage", pid)

    def _late(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        return self._unbuilt(name, *arguments)

    def _other_class(self, module: str, name: str) -> Any:
        self.complete = False
        return self._own(type(name, (Unbuilt,), {"__module__": module}))

    def _own_class(self, kind: type) -> Any:
        if own_classes.has_plain_values(kind):
            return kind
        self.complete = False  # a dataclass may hold something that is still to be built
        return kind if own_classes.is_by_field(kind) else self._other_class(kind.__module__, kind.__qualname__)

    def load_newobj(self) -> None:
        if isinstance(self.stack[-2], Unbuilt):  # it stands for a nested class, which a function has looked up
            self.load_reduce()
        else:
            super().load_newobj()

    def load_newobj_ex(self) -> None:
        if isinstance(self.stack[-3], type) and issubclass(self.stack[-3], Unbuilt):
            self.stack.pop()  # the arguments by name: an unbuilt object has none
            self.load_newobj()
        else:
            super().load_newobj_ex()

    dispatch = {  # noqa: RUF012 - as the base class's
        **_Reader.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
    }

    def _of_class(self, kind: Any, made: Any, state: Any) -> object:
        stand = kind(made, state)
        if isinstance(made, Unbuilt) and type(state) is dict:
            stand.attributes = state
        return stand

    def _wrapper(self, kind: Any, arguments: tuple[Any, ...]) -> object:
        return kind(*arguments)

    def _with_attributes(self, made: Any, attributes: Any) -> Any:
        self.complete = self.complete and not attributes  # they may hold something to be built
        return super()._with_attributes(made, None)


class Lister(_Surveyor):
    """Reads like a survey, and collects the names that are not trusted.

    Attributes:
        untrusted: The names, in their order.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.untrusted: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Look up a name; of one that is not trusted, a stand-in."""
        try:
            return super().find_class(module, name)
        except TrustError as error:
            self.untrusted[error.name] = None
            return _Surveyor._other_class(self, *error.name.rsplit(".", 1))


def _no_arrays(stored: StoredArray) -> object:
    raise FormatError(f"an array (record {stored.record!r}) where none can be")


def loads(
    data: bytes,
    resolve: Callable[[StoredArray], object] = _no_arrays,
    *,
    trust: Trust = (),
    with_torch: bool = True,
) -> Any:
    """Read a pickle back without running code from it.

    Args:
        data: A whole pickle stream.
        resolve: Supplies an object in place of each stored array. For a storage that is a value itself, it gets an
            array of the bytes of a whole record.
        trust: ``"all"``, or the classes and functions, as ``module.qualname``, that may be used beside the safe ones.
        with_torch: Whether to import torch where it is installed, to build torch's objects. Without it, a shape is a
            tuple, and a :class:`~datastates.container.pickle_policy.TorchName` stands for an element type.

    Raises:
        TrustError: It needs a class that is not trusted.
        FormatError: It is not a pickle of this dialect.
        ImportError: ``resolve`` raised it, or only torch builds an object, and is not installed or not wanted.
        TypeError: ``trust`` is neither ``"all"`` nor a list of names.
    """
    return _read(_Reader(data, resolve, trust, with_torch=with_torch))


def survey(
    data: bytes,
    resolve: Callable[[StoredArray], object],
    *,
    trust: Trust = (),
    with_torch: bool = True,
) -> tuple[Any, bool]:
    """Read a pickle as :func:`loads` does, but build no object of another class: :class:`Unbuilt` stands for each.

    The value does not depend on the arrays' elements, so it can be read before them. Raises as :func:`loads` does.

    Returns:
        The value, and whether it is complete: no object is left unbuilt.
    """
    reader = _Surveyor(data, resolve, trust, with_torch=with_torch)
    return _read(reader), reader.complete


def check_trust(trust: Trust) -> None:
    """Raise TypeError if ``trust`` is neither ``"all"`` nor a list of names."""
    if trust != "all" and (isinstance(trust, str) or not all(isinstance(name, str) for name in trust)):
        raise TypeError(f'trust: "all" or a list of names such as "module.Class", not {trust!r}')


def _read(reader: _Reader) -> Any:
    check_trust(reader.trust)
    try:
        return reader.load()
    except TrustError as error:
        raise _naming_all(error, reader) from None
    except (FormatError, ImportError):
        raise
    except Exception as error:
        # a damaged pickle can fail anywhere, also inside a trusted class
        raise FormatError(f"objects cannot be decoded: {type(error).__name__}: {error}") from error


def _naming_all(error: TrustError, reader: _Reader) -> TrustError:
    """The error that names all classes of the pickle that are not trusted, not only the first one."""
    lister = Lister(reader.data, lambda stored: stored, reader.trust, with_torch=reader._with_torch)
    try:
        lister.load()
    except Exception:  # the rest of the pickle is damaged
        return error
    return TrustError(*lister.untrusted)
