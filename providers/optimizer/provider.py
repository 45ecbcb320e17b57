"""A provider of a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from datastates._base import log
from datastates._base.cached import cached_property
from datastates._base.loaded import loaded
from datastates.providers.nested.composed import check_boxes, placed_like
from datastates.providers.nested.pairing import Differences, add, pair
from datastates.providers.nested.tree import Match, TreeProvider, container_of
from datastates.providers.optimizer.state_dict_tree import (
    dtensor_states,
    group_differences,
    groups_of,
    live_where_not_restored,
    other_shapes,
    parameters_of_states,
    with_all_states,
    with_parameters,
)
from datastates.state import dtensors, laziness, subclasses, together
from datastates.state.keys import state_key
from datastates.state.nested import with_items
from datastates.state.provider import Saved
from datastates.state.subclasses import is_tensor


def _names(value: Any) -> list[list[str]] | None:
    """The names of each group's parameters; None if a parameter has none, or two parameters have the same."""
    names = [group.get("param_names") for group in groups_of(value) or ()]
    if not names or any(not isinstance(some, (list, tuple)) for some in names):
        return None
    found = [[str(name) for name in some or ()] for some in names]
    if any(len(a) != len(group["params"]) for a, group in zip(found, value["param_groups"], strict=True)):
        return None
    every = [name for some in found for name in some]
    return found if len(set(every)) == len(every) else None


def in_live_order(stored: Any, live: Any) -> Any:
    """Bring the groups of a stored state dict, and the parameters in each, into the order of the live state dict.

    The stored state dict is returned as it is if it has this order, or if its groups do not hold the same names.
    """
    theirs, ours = _names(stored), _names(live)
    if theirs is None or ours is None or theirs == ours or len(theirs) != len(ours):
        return stored
    by_names = {frozenset(names): number for number, names in enumerate(theirs)}
    if {frozenset(names) for names in ours} != by_names.keys():
        return stored
    groups = []
    for names in ours:
        number = by_names[frozenset(names)]
        numbers = dict(zip(theirs[number], stored["param_groups"][number]["params"], strict=True))
        params = [numbers[name] for name in names]
        groups.append({**stored["param_groups"][number], "params": params, "param_names": list(names)})
    return {**stored, "param_groups": groups}


def name_differences(stored: Any, live: Any) -> dict[str, str]:
    """The difference if parameters have other places or groups in the stored state: states would be mixed up."""
    theirs, ours = _names(stored), _names(live)
    if theirs is None or ours is None:
        return {}
    places = {name: (i, j) for i, names in enumerate(theirs) for j, name in enumerate(names)}
    here = {name: (i, j) for i, names in enumerate(ours) for j, name in enumerate(names)}
    moved = [name for name, place in here.items() if places.get(name, place) != place]
    if not moved:
        return {}
    shown = ", ".join(map(repr, moved[:4]))
    return {"param_groups": f"parameters such as {shown} are in other places or groups in the checkpoint"}


def loads_by_itself(optimizer: Any) -> bool:
    """Whether hooks or methods of the optimizer's own take a state. The state may then have any form."""
    base, kind = loaded("torch").optim.Optimizer, type(optimizer)
    own = "load_state_dict" in vars(optimizer) or kind.load_state_dict is not base.load_state_dict
    return own or bool(optimizer._optimizer_load_state_dict_pre_hooks) or not _is_of_torch(kind.__setstate__)


def is_of_torch(optimizer: Any) -> bool:
    """Whether the optimizer is of ``torch.optim``. Its states have the element type of their parameter."""
    return _is_of_torch(type(optimizer))


def _is_of_torch(found: Any) -> bool:
    return str(found.__module__).startswith("torch.optim.")


def uncast(optimizer: Any, given: Any, keeps: Callable[[Any], bool]) -> dict[str, str]:
    """Undo the conversions of torch's ``load_state_dict``, which gives states the element type of their parameter.

    Args:
        optimizer: The optimizer, which has loaded a state dict.
        given: The state dict.
        keeps: Tells whether a tensor in the state dict must keep its type.

    Returns:
        For each name of a state that was converted and stays so, the type before and the type now.
    """
    changed: dict[str, str] = {}

    def back(name: str, now: Any, before: Any) -> Any:
        if is_tensor(now) and is_tensor(before):
            if now.dtype == before.dtype:
                return now
            if keeps(before):
                return before.to(now.device)
            changed[name] = f"{before.dtype} to {now.dtype}".replace("torch.", "")
        elif isinstance(now, dict) and isinstance(before, dict):
            for key in now.keys() & before.keys():
                now[key] = back(name, now[key], before[key])
        elif isinstance(now, list) and isinstance(before, list):
            now[:] = [back(name, a, b) for a, b in zip(now, before, strict=True)]
        elif isinstance(now, tuple) and isinstance(before, tuple):
            return with_items(now, [back(name, a, b) for a, b in zip(now, before, strict=True)])
        return now

    for _, parameter, states in with_parameters(given, optimizer):
        live = optimizer.state.get(parameter, {})
        for name in states.keys() & live.keys() - {"step"}:  # a step on the device must be float32 for the kernel
            live[name] = back(str(name), live[name], states[name])
    return changed


class OptimizerProvider(TreeProvider):
    """The state of a ``torch.optim.Optimizer``."""

    def __init__(self, name: str, optimizer: Any, lazy: bool | Callable[[str], bool]) -> None:
        """Keep the optimizer; see :func:`~datastates.providers.from_stateful` for ``name`` and ``lazy``."""
        super().__init__(name)
        self._optimizer = optimizer
        self._lazy = lazy

    def value(self) -> object:
        """The optimizer's state now."""
        return container_of(self.name, self._optimizer.state_dict())

    def _before_load(self) -> object:
        """The live state to compare a stored state with.

        The whole state of a ``ZeroRedundancyOptimizer`` exists only after a collective. Its load needs none of it, so
        this rank's part is used.
        """
        zero = loaded("torch.distributed.optim.zero_redundancy_optimizer")
        if zero is not None and isinstance(self._optimizer, zero.ZeroRedundancyOptimizer):
            return loaded("torch").optim.Optimizer.state_dict(self._optimizer)
        return self.value()

    def stepped(self) -> Iterable[object]:
        """The optimizer's parameters."""
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def is_lazy(self, key: str, array: Any) -> bool:
        """Whether an array is a parameter's state. A scheduler changes the values in ``param_groups``.

        An optimizer that updates parameters during ``backward()`` changes their states then, too.
        """
        lazy = self._lazy(key) if callable(self._lazy) else self._lazy and not self._updates_in_backward
        return lazy and key.startswith("state/") and subclasses.is_tensor(array)

    @cached_property
    def _updates_in_backward(self) -> bool:
        return any(map(laziness.is_updated_in_backward, self.stepped()))

    def match(self, stored: Any, saved: Saved) -> Match:
        """Restore into live memory the states that the optimizer has, and into new memory all others.

        All memory is new if hooks or methods of the optimizer's own take the state, or if the parameters are in another
        order than in the checkpoint.
        """
        live, is_plain = self._before_load(), not loads_by_itself(self._optimizer)
        ordered = in_live_order(stored, live) if is_plain else stored
        if is_plain and (differences := group_differences(ordered, live) or name_differences(ordered, live)):
            saved.report(mismatched=differences)
            return Match([], lambda _: None)
        is_same = ordered is stored
        places = dtensor_states(ordered, self._optimizer)
        check_boxes(self.name, self.listed(saved), lambda: places)
        stored, added = with_all_states(ordered, saved)
        known = saved.arrays()
        keys = dict.fromkeys([*self.listed(saved), *(state_key(number, name) for number, name in added)])
        for number, mismatched in other_shapes(stored, self._optimizer).items() if is_plain else ():
            saved.report(mismatched=mismatched)
            for name in stored["state"][number]:  # all states of a parameter are restored, or none
                keys.pop(state_key(number, name), None)
        both = pair(stored, live, known) if is_same else Differences()
        pairs, sharded = both.pairs, both.sharded
        for key in sharded:  # they are read in place, as DCP does
            keys.pop(key, None)
        # a rate in a tensor is replaced by a new tensor, as by torch: the optimizer's defaults may hold the old tensor
        states = [(ref.key, array) for ref, array in pairs if ref.key.startswith("state/")]
        into = together.in_place(saved, {key: array for key, array in states if is_plain or dtensors.is_dtensor(array)})
        like = {ref.key: array for ref, array in pairs} | parameters_of_states(stored, self._optimizer)
        new = together.fresh(
            saved, (key for key in keys if key not in into and key not in sharded), like, of_optimizer=True
        )
        found = {key: into[key] if key in into else new[key] for key in keys if key not in sharded}
        found_added = ((number, name, found.get(state_key(number, name))) for number, name in added)
        added_states = [(("state", number, name), array) for number, name, array in found_added if array is not None]

        in_place, of_torch = {id(array) for array in into.values()}, is_of_torch(self._optimizer)

        def keeps(tensor: Any) -> bool:
            return not of_torch or id(tensor) in in_place

        def accept(value: Any) -> None:
            for path, item in added_states:
                add(value, path, item)
            if is_plain:
                value = live_where_not_restored(in_live_order(value, live), self._optimizer)
            for number, _, states in with_parameters(value, self._optimizer) if places else ():
                for name, item in states.items():
                    if subclasses.is_composed(item):
                        states[name] = subclasses.beside(places.get(state_key(number, name)), item)
            self._optimizer.load_state_dict(placed_like(value, live) if sharded else value)
            if is_plain and (cast := uncast(self._optimizer, value, keeps)):
                log.warning("%r: torch has converted states to the type of their parameters: %s", self.name, cast)

        return Match(list(found.items()), accept, sharded)
