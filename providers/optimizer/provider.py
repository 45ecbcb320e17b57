"""A provider of a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from datastates._base import log
from datastates._base.loaded import loaded
from datastates.providers.nested.composed import check_boxes, placed_like
from datastates.providers.nested.pairing import Differences, add, pair
from datastates.providers.nested.tree import Match, TreeProvider, container_of
from datastates.providers.optimizer.load_code import is_of_torch, loads_by_itself, uncast
from datastates.providers.optimizer.parameter_names import in_live_order, name_differences
from datastates.providers.optimizer.state_dict_tree import (
    dtensor_states,
    group_differences,
    live_where_not_restored,
    other_shapes,
    parameters_of_states,
    with_all_states,
    with_parameters,
)
from datastates.providers.optimizer.stored_states import state_key
from datastates.state import dtensors, laziness, subclasses, together
from datastates.state.provider import Saved


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
