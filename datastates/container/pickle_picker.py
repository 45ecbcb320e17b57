"""Builds some objects of a pickle, and leaves the others: those that are not trusted, or whose arrays are not there."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from typing import Any

from datastates.container.pickle_reader import Lister, Trust, _read, _Reader, _Surveyor
from datastates.container.pickle_tensors import TensorReader
from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError, TrustError
from datastates.state import subclasses
from datastates.state.shards import StoredArray

_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_STEPS_EACH = 64
"""Most steps of looking into containers for each byte of the pickle: its containers may refer to each other."""


class _Picker(Lister):
    """Builds what it may, of arrays that are there. All else, and objects made with any of it, is left unbuilt.

    Attributes:
        reasons: By name, why a trusted class cannot be imported.
    """

    def __init__(self, data: bytes, resolve: Callable[[StoredArray], object], trust: Trust) -> None:
        super().__init__(data, resolve, trust, with_torch=True)
        self.reasons: dict[str, FormatError] = {}
        self._half_built: dict[int, object] = {}  # by id
        self._steps = 0

    def _lacks(self, *values: object) -> bool:
        """Whether any value, or a value in its containers, is left unbuilt or half built."""
        left, seen = list(values), set[int]()
        while left:
            one: Any = left.pop()
            self._steps += 1
            if self._steps > _STEPS_EACH * (len(self.data) + _STEPS_EACH):
                raise FormatError("containers that refer to each other too often")
            if isinstance(one, Unbuilt) or (isinstance(one, type) and issubclass(one, Unbuilt)):
                return True
            if id(one) in self._half_built:
                return True
            if isinstance(one, _CONTAINERS) and id(one) not in seen:
                seen.add(id(one))
                left += [*one, *one.values()] if isinstance(one, dict) else one
        return False

    def _spoil(self, value: object) -> None:
        self._half_built[id(value)] = value

    def _stand_in(self, made_by: Any, *arguments: Any) -> Any:
        if isinstance(made_by, Unbuilt) or (isinstance(made_by, type) and issubclass(made_by, Unbuilt)):
            return self._own(made_by(*arguments))
        return self._unbuilt(getattr(made_by, "__name__", "call"), *arguments)

    def _other_class(self, module: str, name: str) -> Any:
        try:
            return _Reader._other_class(self, module, name)
        except FormatError as error:
            self.reasons[f"{module}.{name}"] = error
            return _Surveyor._other_class(self, module, name)

    def _own_class(self, kind: type) -> Any:
        return _Reader._own_class(self, kind)

    def _late(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        if self._lacks(arguments):
            return self._unbuilt(name, *arguments)
        return _Reader._late(self, name, make, *arguments)

    def _of_class(self, kind: Any, made: Any, state: Any) -> object:
        if self._lacks(kind, made, state):
            return self._stand_in(kind, made, state)
        return _Reader._of_class(self, kind, made, state)

    def _wrapper(self, kind: Any, arguments: tuple[Any, ...]) -> object:
        if self._lacks(kind, arguments):
            return self._stand_in(kind, *arguments)
        return _Reader._wrapper(self, kind, arguments)

    def _with_attributes(self, made: Any, attributes: Any) -> Any:
        if attributes and subclasses.is_tensor(made) and self._lacks(attributes):
            self._spoil(made)
            return made
        return TensorReader._with_attributes(self, made, attributes)

    def _check_target(self, target: Any, kind: type | tuple[type, ...]) -> None:
        super()._check_target(target, kind)
        if not isinstance(target, (*_CONTAINERS, Unbuilt)):
            self._spoil(target)  # it may get an item that is left unbuilt

    def _call(self) -> bool:
        """Put a stand-in in the place of a call, on the stack, that lacks an argument. Returns whether it lacks one."""
        function, arguments = self.stack[-2:]
        if self._is_rebuild(function) or type(arguments) is not tuple or not self._lacks(function, arguments):
            return False
        self.stack[-2:] = [self._stand_in(function, *arguments)]
        return True

    def load_reduce(self) -> None:
        if not self._call():
            super().load_reduce()

    def load_newobj(self) -> None:
        if not self._call():
            super().load_newobj()

    def load_newobj_ex(self) -> None:
        if self._lacks(*self.stack[-3:]):
            self.stack[-2] = (self.stack[-2], self.stack.pop())
            self._call()
        else:
            super().load_newobj_ex()

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        if isinstance(target, Unbuilt):
            target.arguments = (*target.arguments, state)
            self.stack.pop()
        elif type(target) is not collections.OrderedDict and self._lacks(target, state):
            self._spoil(target)
            self.stack.pop()
        else:
            super().load_build()

    dispatch = {  # noqa: RUF012 - as the base class's
        **Lister.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
    }


class Picked:
    """The value of a pickle of which a part was built.

    Attributes:
        value: The value, with an Unbuilt for each object that was left.
    """

    def __init__(self, data: bytes, resolve: Callable[[StoredArray], object], trust: Trust) -> None:
        """Build what may be built.

        Args:
            data: A whole pickle stream.
            resolve: Supplies an object in place of each stored array: an :class:`Unbuilt` for an array that is not
                there.
            trust: As for :func:`datastates.container.pickle_reader.loads`.

        Raises:
            FormatError: It is not a pickle of this dialect, or a trusted class fails.
        """
        self._reader = _Picker(data, resolve, trust)
        self.value = _read(self._reader)

    def vet(self, stand: object) -> None:
        """Raise an error if an object was left because of its classes, or those of objects in it.

        Args:
            stand: An Unbuilt in the value.

        Raises:
            TrustError: Classes are not trusted; the message names all of them.
            FormatError: A trusted class cannot be imported.
        """
        names = _names_in(stand)
        if untrusted := [name for name in self._reader.untrusted if name in names]:
            raise TrustError(*untrusted)
        for name in names & self._reader.reasons.keys():
            raise self._reader.reasons[name]


def _names_in(stand: object) -> set[str]:
    """The names of all stand-ins in a value, as ``module.qualname``."""
    found: set[str] = set()
    left, seen = [stand], set[int]()
    while left:
        one: Any = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kind = one if isinstance(one, type) else type(one)
        if issubclass(kind, Unbuilt):
            found.add(f"{kind.__module__}.{kind.__qualname__}")
            left += () if isinstance(one, type) else one.arguments
        elif isinstance(one, _CONTAINERS):
            left += [*one, *one.values()] if isinstance(one, dict) else one
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            left += vars(one).values()
    return found
