"""A provider of an optimizer of torch."""

from __future__ import annotations

from typing import Any

from datastates.providers.nested.pairing import add, pair
from datastates.providers.nested.tree import Match, TreeProvider, container_of
from datastates.providers.optimizer.state_dict_tree import (
    group_differences,
    live_where_not_restored,
    other_shapes,
    sharded_parameters,
    with_all_states,
)
from datastates.providers.optimizer.stored_states import state_key
from datastates.state import dressed, memory
from datastates.state.provider import Saved


class OptimizerProvider(TreeProvider):
    """The state of a ``torch.optim.Optimizer``."""

    def __init__(self, name: str, optimizer: Any, lazy: bool) -> None:
        """Take what :func:`~datastates.providers.from_stateful` takes."""
        super().__init__(name)
        self._optimizer = optimizer
        self._lazy = lazy

    def value(self) -> object:
        """The optimizer's state now."""
        return container_of(self.name, self._optimizer.state_dict())

    def is_lazy(self, key: str, array: Any) -> bool:
        """Whether it is a parameter's state. A scheduler changes the values in ``param_groups``."""
        return self._lazy and key.startswith("state/") and dressed.is_tensor(array)

    def match(self, stored: Any, saved: Saved) -> Match:
        """Live memory for the states that there are, and new memory for the others."""
        live = self.value()
        differences = group_differences(stored, live)
        saved.report(mismatched=differences)
        if differences:
            return Match([], lambda _: None)
        stored, added = with_all_states(stored, saved)
        into = {ref.key: array for ref, array in pair(stored, live, saved.arrays()).pairs}
        like = sharded_parameters(stored, self._optimizer)
        known = saved.arrays()
        keys = dict.fromkeys([*self.listed(saved), *(state_key(number, name) for number, name in added)])
        for number, mismatched in other_shapes(stored, self._optimizer).items():
            saved.report(mismatched=mismatched)
            for name in stored["state"][number]:  # a parameter restores all its states or none
                keys.pop(state_key(number, name), None)
        found = {key: into[key] if key in into else memory.fresh(known[key], like.get(key)) for key in keys}
        found_added = ((number, name, found.get(state_key(number, name))) for number, name in added)
        added_states = [(("state", number, name), array) for number, name, array in found_added if array is not None]

        def accept(value: Any) -> None:
            for path, item in added_states:
                add(value, path, item)
            self._optimizer.load_state_dict(live_where_not_restored(value, self._optimizer.state_dict()))

        return Match(list(found.items()), accept)
