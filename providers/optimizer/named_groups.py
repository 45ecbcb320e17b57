"""State dicts of optimizers that are keyed by parameter names, cut down to the parameters of the live one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from datastates.container.unbuilt import Unbuilt
from datastates.providers.optimizer.state_dict_tree import groups_of
from datastates.providers.optimizer.stored_states import StoredStates
from datastates.state import nested
from datastates.state.keys import component, join
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef


class LiveNames:
    """The live parameters' part of a stored state dict.

    Stages of a pipeline may be cut otherwise than when they were saved. A live group then has the options of the group
    that held its parameters, which another rank may have stored.

    Attributes:
        left_out: Keys of the stored parameters that are not among the live ones.
        mismatched: The live groups whose parameters were saved with several options, each with the difference.
    """

    def __init__(self, stored: Any, live: Any, saved: Saved) -> None:
        """Compare the names. Other ranks' objects are read only if a live name is not in this rank's.

        Args:
            stored: The value that this rank stored, or any other value, which is then left as it is.
            live: The live value.
            saved: The checkpoint.
        """
        self.left_out: list[str] = []
        self.mismatched: dict[str, str] = {}
        self._names: list[list[str]] = []
        self._sources: list[int | dict[str, Any]] | None = None
        groups, names = _names(stored), _names(live)
        if groups is None or names is None:
            return
        self._names = names
        held: dict[str, int | dict[str, Any]] = {name: i for i, group in enumerate(groups) for name in group}
        absent = {name for group in names for name in group}.difference(held)
        elsewhere = _elsewhere(absent, saved) if absent else {}
        if elsewhere:
            self._sources = self._found(held | elsewhere, stored, live)
        elif len(groups) == len(names):
            in_place = all(held.get(name, i) == i for i, group in enumerate(names) for name in group)
            self._sources = list(range(len(groups))) if in_place else None
        if self._sources is not None:
            self._stored_in = frozenset(held)
            kept = self._kept(stored)
            self.left_out = [join("state", name) for name in stored["state"] if name not in kept]

    def cut(self, stored: Any) -> Any:
        """Cut a stored state dict down to the live parameters.

        Parameters of other ranks are thus not compared. Any other value is returned as it is. So is a state dict with
        another number of groups, or with a live parameter in another group, unless another rank stored the group.
        """
        if self._sources is None:
            return stored
        groups = stored["param_groups"]
        options = [groups[source] if isinstance(source, int) else source for source in self._sources]
        return {
            **stored,
            "state": self._kept(stored),
            "param_groups": [
                {**group, "params": list(names)} for group, names in zip(options, self._names, strict=True)
            ],
        }

    def _kept(self, stored: Any) -> dict[Any, Any]:
        every = {name for names in self._names for name in names}
        return {name: of for name, of in stored["state"].items() if name in every or name not in self._stored_in}

    def _found(self, held: dict[str, int | dict[str, Any]], stored: Any, live: Any) -> list[int | dict[str, Any]]:
        """For each live group, the group that holds its parameters: a number in the stored value, or another rank's."""
        sources: list[int | dict[str, Any]] = []
        for i, (names, group) in enumerate(zip(self._names, live["param_groups"], strict=True)):
            found = [held[name] for name in names if name in held]
            options = [_options(stored["param_groups"][s] if isinstance(s, int) else s) for s in found]
            if any(other != options[0] for other in options[1:]):
                self.mismatched[join("param_groups", i)] = "parameters of groups with other options in the checkpoint"
            sources.append(found[0] if found else group)
        return sources


def is_by_name(value: Any) -> bool:
    """Whether a value is a state dict of an optimizer that is keyed by parameter names."""
    return _names(value) is not None


def _names(value: Any) -> list[list[str]] | None:
    """The parameter names of each group, if an optimizer's state is keyed by names; else None."""
    groups = groups_of(value)
    if groups is None or not isinstance(value.get("state"), dict):
        return None
    names = [group["params"] for group in groups]
    return names if all(isinstance(name, str) for group in names for name in group) else None


def _elsewhere(names: set[str], saved: Saved) -> dict[str, int | dict[str, Any]]:
    """The groups of other ranks that hold parameters of these names, by name."""
    found: dict[str, int | dict[str, Any]] = {}
    for other in _structures(names, saved):
        for group in groups_of(other) or []:
            whole = not any(isinstance(leaf, (ArrayRef, Unbuilt)) for _, leaf in nested.leaves(group))
            found.update(dict.fromkeys(names.intersection(group["params"]), group) if whole else {})
    return found


def _structures(names: Collection[str], saved: Saved) -> Iterator[object]:
    """The objects of the ranks that stored states of the parameters of these names."""
    states = StoredStates(saved)
    states.find(list(names))
    arrays = [key for name in names for key in states.of.get(component(name), {}).values()]
    return saved.structures_beside("", arrays) if arrays else iter(())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
