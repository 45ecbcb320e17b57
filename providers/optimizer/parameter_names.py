"""Finds an optimizer's parameters by name, if both states hold ``param_names``. torch goes by their order alone."""

from __future__ import annotations

from typing import Any

from datastates.providers.optimizer.state_dict_tree import groups_of


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
