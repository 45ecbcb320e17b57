"""Which states a checkpoint holds of an optimizer's parameters, whichever ranks had them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from datastates.providers.optimizer.flat_layout import Name
from datastates.state.keys import component
from datastates.state.provider import Saved

_NUMBERS = ("step", "mu_product", "mu", "eta")
"""What torch's optimizers keep as a number for each parameter; of a part of one, only one rank has saved them."""


class StoredStates:
    """Keys of the form ``state/<parameter>/<state>``, as a nested optimizer state dict has them.

    What one rank had is listed; that of others is found by key, which does not touch all of many ranks.

    Attributes:
        of: For each parameter, as a key's component, the keys by state.
        others: Keys of another form.
        names: The states' names, in order.
    """

    def __init__(self, saved: Saved) -> None:
        """Take what is listed."""
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
        """Find what other ranks had of some parameters, by the names of states that are listed."""
        # where one number of a parameter is listed, so are all
        numbers = _NUMBERS if self.names.keys().isdisjoint(_NUMBERS) else ()
        for parameter in map(component, parameters):
            for state in (*self.names, *numbers):
                key = f"state/{parameter}/{state}"
                if state not in self.of.get(parameter, {}) and key in self._known:
                    self.of.setdefault(parameter, {})[state] = key
        self.names |= dict.fromkeys(state for p in parameters for state in self.of.get(component(p), {}))

    def find(self, parameters: Collection[Name]) -> None:
        """Find all that any rank had of some parameters, through all ranks where names do not tell."""
        listed = bool(self.names)
        self.probe(parameters)
        sure = listed and not self.names.keys().isdisjoint(_NUMBERS)
        if not sure or any(self.of.get(component(p), {}).keys() != self.names.keys() for p in parameters):
            self._add(self._saved.every_key())
