"""Finds the states of an optimizer's parameters that a checkpoint holds, from all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from datastates.state.flat_layout import Name
from datastates.state.keys import component
from datastates.state.provider import Saved

_NUMBERS = ("step", "mu_product", "mu", "eta")
"""Names of states that are one number for each parameter. If ranks share a parameter out, only one rank saved them."""


class StoredStates:
    """Stored keys of the form ``state/<parameter>/<state>``, as in a nested optimizer state dict.

    The checkpoint lists the keys that the rank with this rank's number saved. Keys of other ranks are looked up one by
    one, because listing the keys of many ranks takes long.

    Attributes:
        of: For each parameter, as a key's component, the keys of its states by the states' names.
        others: Listed keys of another form.
        names: The names of the states as keys, in the order in which they were found.
    """

    def __init__(self, saved: Saved) -> None:
        """Begin with the keys that the checkpoint lists."""
        self._saved = saved
        self._known = saved.arrays()
        self.of: dict[str, dict[str, str]] = {}
        self.others: list[str] = []
        self._add(self._known)
        self.names = dict.fromkeys(state for states in self.of.values() for state in states)

    def _add(self, keys: Iterable[str]) -> None:
        self.others = []
        for key in keys:
            parts = key.split("/")
            if len(parts) == 3 and parts[0] == "state" and "~" not in parts[2]:
                self.of.setdefault(parts[1], {})[parts[2]] = key
            else:
                self.others.append(key)

    def probe(self, parameters: Collection[Name]) -> None:
        """Find states of the given parameters that other ranks saved, by the names of the states known so far."""
        # a rank that lists one of a parameter's numbers lists all: `names` then has them
        numbers = _NUMBERS if self.names.keys().isdisjoint(_NUMBERS) else ()
        for parameter in map(component, parameters):
            for state in (*self.names, *numbers):
                key = f"state/{parameter}/{state}"
                if state not in self.of.get(parameter, {}) and key in self._known:
                    self.of.setdefault(parameter, {})[state] = key
        self.names |= dict.fromkeys(state for p in parameters for state in self.of.get(component(p), {}))

    def find(self, parameters: Collection[Name]) -> None:
        """Find all states of the given parameters. If names do not suffice, this goes through the keys of all ranks."""
        listed = bool(self.names)
        self.probe(parameters)
        sure = listed and not self.names.keys().isdisjoint(_NUMBERS)
        if not sure or any(self.of.get(component(p), {}).keys() != self.names.keys() for p in parameters):
            self._add(self._saved.every_key())
