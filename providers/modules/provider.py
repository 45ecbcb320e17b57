"""A provider of a module: tensors that ``load_state_dict`` only copies are read in place, the rest is given to it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from datastates._base.loaded import loaded
from datastates.container.unbuilt import Unbuilt
from datastates.providers.modules.changes import changing
from datastates.providers.modules.taking import LoadCode, Taking, place_of
from datastates.providers.modules.wrappers import Unwrapped, without_prefixes
from datastates.providers.nested.composed import check_boxes
from datastates.providers.nested.pairing import add
from datastates.providers.nested.tree import Match, TreeProvider, container_of
from datastates.state import arrays, dtensors, laziness, storages, subclasses, tensor_scan
from datastates.state.depth import deeper
from datastates.state.destinations import Destinations
from datastates.state.keys import component, is_inner, parts
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Shard


class ModuleProvider(TreeProvider):
    """The state of a ``torch.nn.Module``."""

    takes_parts = True

    def __init__(self, name: str, wrapped: Unwrapped, lazy: bool | Callable[[str], bool]) -> None:
        """Keep the module; see :func:`~datastates.providers.from_stateful` for ``name`` and ``lazy``."""
        super().__init__(name)
        self._wrapped, self._module = wrapped, wrapped.module
        self._lazy = lazy
        self._parameters: frozenset[int] | None = None
        self._changing: tuple[()] | tuple[frozenset[int] | None] = ()
        self._beside: list[int] = []  # ids of the providers of the last snapshot
        self._stepped: frozenset[int] = frozenset()
        self._shape: list[object] | None = None  # of the module, if its state follows from that

    def value(self) -> object:
        """The module's state now."""
        return container_of(self.name, self._module.state_dict())

    def knowledge(self) -> object:
        """The form of the state, and the classes and names in the module that it follows from."""
        inner = super().knowledge()
        return None if inner is None else (inner, self._shape)

    def learn(self, knowledge: object) -> None:
        """Take the findings of an earlier provider."""
        assert isinstance(knowledge, tuple)
        inner, self._shape = knowledge
        super().learn(inner)

    @deeper()
    def shards(self) -> Sequence[Shard]:
        """As the base class says. The state of a module that is built as before is read without ``state_dict()``."""
        tensors, shape = tensor_scan.module_tensors(self._module) or ([], None)
        if shape is not None and shape == self._shape and self._form is not None:
            self._changing = ()
            if (again := self._filled(self._form, tensors, [])) is not None:
                return again
        state, detached = self._current()
        shards = self._described(state, detached)
        self._shape = None
        if self._form is not None and detached and isinstance(state, dict):
            self._shape = shape if _are_same(tensors, [*state.values()]) else None
        return shards

    def _current(self) -> tuple[object, bool]:
        state = _variables(self._module)
        self._parameters, self._changing = None, ()
        if state is not None:
            return state, True
        self._parameters = frozenset(
            arrays.address(p) for p in self._module.parameters() if arrays.kind_of(p) is not None
        )
        return self.value(), False

    def _lazy_again(self, keys: Sequence[str], values: Sequence[object], storages: Sequence[Any]) -> list[bool]:
        if self._parameters is None:
            return super()._lazy_again(keys, values, storages)
        return [self.is_lazy(key, array) for key, array in zip(keys, values, strict=True)]

    def is_lazy(self, key: str, array: Any) -> bool:
        """Whether only an optimizer's step changes an array. This holds for most parameters; see ``changes.py``."""
        if not (self._lazy(key) if callable(self._lazy) else self._lazy and not self._may_change(array)):
            return False
        if self._parameters is not None:
            return arrays.kind_of(array) == "torch" and arrays.address(array) in self._parameters
        return laziness.is_parameter(array)

    def stand_beside(self, providers: Sequence[StateProvider]) -> None:
        """Look for the parameters of the providers' optimizers. For the same providers as before, nothing is done."""
        beside = list(map(id, providers))
        if self._lazy_flags is None or beside != self._beside:
            self._beside, self._lazy_flags = beside, None
            self._stepped = frozenset(id(parameter) for provider in providers for parameter in provider.stepped())

    def _may_change(self, array: Any) -> bool:
        found = self._changing[0] if self._changing else changing(self._module, self._stepped)
        self._changing = (found,)  # kept until the next snapshot
        return found is None or (bool(found) and arrays.kind_of(array) == "torch" and storages.address(array) in found)

    def match(self, stored: object, saved: Saved) -> Match:
        """Restore into live memory if ``load_state_dict`` would only copy; into new memory values to give to it."""
        live: Any = self.value()
        taking = Taking.of(self._wrapped, live, stored, saved, self.listed(saved))
        saved.report(missing=taking.missing, unexpected=taking.unexpected, mismatched=taking.mismatched)
        check_boxes(self.name, self.listed(saved), lambda: {taking.prefix + k: t for k, t in live.items()})
        copied = ((key, taking.code.copied[name]) for name, key in taking.copied.items())

        def accept(value: Any) -> None:
            if not taking.code.is_plain and "" not in taking.mismatched:
                state, whole = taking.state(value)
                self._load(state, taking.code, saved, strict=saved.strict and whole)

        return Match([*copied, *taking.new.items(), *self.inside(saved)], accept, taking.sharded)

    def arrays_by_name(self, saved: Saved) -> Sequence[Shard]:
        """Restore into live memory if ``load_state_dict`` would only copy; into new memory arrays to give to it."""
        known, live = saved.arrays(), self.value()
        # a name with several arrays below it is an object, and names alone do not tell how to build it
        keys = [key for key in known if "/" not in key and not is_inner(key)]
        stored: dict[Any, Any] = {parts(key)[0]: known[key] for key in keys}
        composed = {key: inside for key, inside in saved.composed().items() if "/" not in key}
        stored |= {parts(key)[0]: type(saved.kind(key), (Unbuilt,), {})() for key in composed}
        taking = Taking.of(self._wrapped, live, stored, saved, keys)
        prefix = taking.prefix
        copied = {component(prefix + name): t for name, t in taking.code.copied.items() if not t.is_meta}
        tied = _by_place(live, [str(name).removeprefix(prefix) for name in stored])
        missing = [key for key in taking.missing if key not in copied]
        saved.report(
            missing=[key for key in missing if place_of(_get(live, parts(key.removeprefix(prefix))[0])) not in tied],
            mismatched=taking.mismatched,
        )
        new = taking.new | taking.inside(composed)
        return Destinations([*copied, *new], [*copied.values(), *new.values()])

    def take_arrays(self, shards: Sequence[Shard], saved: Saved) -> None:
        """Give the module the arrays, if its ``load_state_dict`` does more than copy."""
        state: dict[Any, Any] = {}
        inside = {shard.key: shard.source for shard in shards if is_inner(shard.key)}
        for shard in shards:
            if shard.key not in inside:
                add(state, tuple(parts(shard.key)), shard.source)
        built = {parts(key)[0]: tensor for key, tensor in saved.built(inside).items()}
        state, prefix = without_prefixes(state | built, self._wrapped.prefixes)
        code = LoadCode.of(self._module, state, {})
        if code.is_plain:
            return
        live: Any = self.value()
        for name in (str(name).removeprefix(prefix) for name in built):
            state[name] = subclasses.beside(_get(live, name), state[name])
        tied = _by_place(live, state)
        for name, tensor in live.items() if isinstance(live, dict) else ():
            if name not in state and (place := place_of(tensor)) in tied:
                state[name] = state[tied[place]]
        self._load(state, code, saved, strict=saved.strict and all(name in state for name in live))

    def _load(self, state: Any, code: LoadCode, saved: Saved, *, strict: bool) -> None:
        """Call ``load_state_dict``, and report the missing and unexpected keys that it returns without an error."""
        load = self._module.load_state_dict
        is_told = {p.kind if p.kind is p.VAR_KEYWORD else p.name for p in inspect.signature(load).parameters.values()}
        if strict or is_told.isdisjoint(("strict", inspect.Parameter.VAR_KEYWORD)):
            result = load(state)
        else:
            result = load(state, strict=False)
        if strict:  # load_state_dict() has raised an error for any key that it does not tolerate
            return
        missing, unexpected = (getattr(result, name, ()) for name in ("missing_keys", "unexpected_keys"))
        saved.report(
            missing=[component(name) for name in missing if code.takes(name)],
            unexpected=[component(name) for name in unexpected if code.takes(name)],
        )


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether two lists have the same objects."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _get(state: Any, name: object) -> object:
    return state.get(name) if isinstance(state, dict) else None


def _by_place(live: Any, names: Any) -> dict[int, Any]:
    """Names of a state, by the address of the live tensor. Names without a tensor in memory are left out."""
    return {place: name for name in names if (place := place_of(_get(live, name)))}


def _variables(module: Any) -> dict[str, Any] | None:
    """A module's state with parameters as ``Parameter``s, which tells them from buffers; None where that is not safe.

    It is not safe if ``state_dict`` is overridden, or the state holds anything but tensors, parameters and DTensors.
    """
    torch = loaded("torch")
    if "state_dict" in vars(module) or type(module).state_dict is not torch.nn.Module.state_dict:
        return None
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    plain = all(t in (torch.Tensor, torch.nn.Parameter) or dtensors.is_class(t) for t in set(map(type, state.values())))
    return state if plain else None
