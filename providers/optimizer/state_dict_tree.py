"""Nested state dicts of optimizers, which hold the states of each parameter and the parameters of each group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datastates.providers.optimizer.stored_states import StoredStates
from datastates.state import dtensors
from datastates.state.keys import component, state_key
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef


def group_differences(stored: Any, live: Any) -> dict[str, str]:
    """Differences in the number or size of parameter groups. States would go to wrong parameters if there are any."""
    try:
        sizes = [[len(g["params"]) for g in s["param_groups"]] for s in (stored, live)]
    except (KeyError, TypeError):
        return {}
    if sizes[0] == sizes[1]:
        return {}
    return {"param_groups": f"groups of {sizes[0]} parameters in the checkpoint, of {sizes[1]} in the live state"}


def groups_of(value: Any) -> list[dict[str, Any]] | None:
    """The parameter groups in a state dict of an optimizer; None if it has no valid ones."""
    groups = value.get("param_groups") if isinstance(value, dict) else None
    good = isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, (str, int)) for name in group["params"])
        for group in groups
    )
    return groups if good else None


_LIKE_PARAMETERS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax"),
}
"""States of torch's own optimizers that have the shape of their parameter."""


def _states(value: Any) -> dict[object, dict[str, Any]]:
    """The states in a state dict of torch's optimizers, by the parameter's number; empty for any other value."""
    states = value.get("state") if isinstance(value, dict) else None
    plain = isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())
    return states if plain and states is not None else {}


def with_parameters(stored: Any, optimizer: Any) -> Iterator[tuple[object, Any, dict[str, Any]]]:
    """For each live parameter: its name or number in a stored state dict of equal groups, itself, its stored states."""
    if states := _states(stored):
        groups = groups_of(stored) or []
        numbers = [number for group in groups for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=False):  # its own code may take other groups
            yield number, parameter, states.get(number, {})


def parameters_of_states(stored: Any, optimizer: Any) -> dict[str, Any]:
    """The live parameter by the key of each of its stored states that has the parameter's shape."""
    return {
        state_key(number, name): parameter
        for number, parameter, states in with_parameters(stored, optimizer)
        for name, state in states.items()
        if isinstance(state, ArrayRef) and state.shape == tuple(parameter.shape)
    }


def dtensor_states(stored: Any, optimizer: Any) -> dict[str, Any]:
    """The DTensor that each stored state belongs to, by the state's key: the live state, or else its parameter."""
    found = {}
    for number, parameter, states in with_parameters(stored, optimizer):
        if dtensors.is_dtensor(parameter):
            live = optimizer.state.get(parameter, {})
            for name in states:
                held = live.get(name)
                found[state_key(number, name)] = held if dtensors.is_dtensor(held) else parameter
    return found


def other_shapes(stored: Any, optimizer: Any) -> dict[object, dict[str, str]]:
    """Find parameters whose shape has changed since the save, by states that torch keeps in the parameter's shape.

    Only torch's own optimizers are checked: others may keep states of any shape.

    Returns:
        For each such parameter, by name or number: the keys of these states, each with the difference as text.
    """
    bases = [f"{base.__module__}." for base in type(optimizer).__mro__ if base.__name__ != "Optimizer"]
    found: dict[object, dict[str, str]] = {}
    if any(base.startswith("torch.optim.") for base in bases):
        for number, parameter, states in with_parameters(stored, optimizer):
            for name, ref in states.items():
                if name in _LIKE_PARAMETERS and isinstance(ref, ArrayRef) and ref.shape != tuple(parameter.shape):
                    found.setdefault(number, {})[state_key(number, name)] = (
                        f"{ref.dtype} of shape {ref.shape} in the checkpoint, "
                        f"its parameter is of shape {tuple(parameter.shape)} in the live state"
                    )
    return found


def live_where_not_restored(value: Any, optimizer: Any) -> Any:
    """Keep the live states, if any, of each parameter whose states were not all restored, in a restored state dict."""
    live = {number: optimizer.state.get(parameter) for number, parameter, _ in with_parameters(value, optimizer)}
    kept = {
        number: live.get(number)
        for number, states in _states(value).items()
        if any(isinstance(state, ArrayRef) for state in states.values())
    }
    if not kept:
        return value
    states = {number: kept.get(number, restored) for number, restored in value["state"].items()}
    return {**value, "state": {number: state for number, state in states.items() if state is not None}}


def with_all_states(stored: Any, saved: Saved) -> tuple[Any, list[tuple[object, str]]]:
    """Add to the state dict that one rank stored the states of its parameters that only other ranks stored.

    Returns:
        The state dict; and for each state that was added, the parameter's name or number, and the state's name.
    """
    try:
        numbers = [number for group in stored["param_groups"] for number in group["params"]]
        listed = {number: dict(states) for number, states in stored["state"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        return stored, []  # not a state dict of torch's optimizers
    if len({tuple(listed.get(number, ())) for number in numbers}) <= 1 and (listed or not numbers):
        return stored, []  # all parameters have the same states
    known, states = saved.arrays(), StoredStates(saved)
    look = states.probe if listed else states.find  # probe() needs names of states
    look([number for number in numbers if isinstance(number, (int, str))])
    added = []
    for number in numbers:
        for state, key in states.of.get(component(number), {}).items():
            if state not in listed.get(number, {}):
                listed.setdefault(number, {})[state] = known[key]
                added.append((number, state))
    return ({**stored, "state": listed}, added) if added else (stored, [])
