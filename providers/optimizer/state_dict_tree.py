"""Nested state dicts of optimizers: of each parameter its states, and for each group the parameters in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from datastates.providers.optimizer.stored_states import StoredStates
from datastates.state import dtensors, memory
from datastates.state.keys import component, join
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef


def state_key(parameter: object, state: str) -> str:
    """The key of one state of one parameter."""
    return join(join("state", parameter), state)


def group_differences(stored: Any, live: Any) -> dict[str, str]:
    """Parameter groups of another number or size: the states would be given to other parameters."""
    try:
        sizes = [[len(g["params"]) for g in s["param_groups"]] for s in (stored, live)]
    except (KeyError, TypeError):
        return {}
    if sizes[0] == sizes[1]:
        return {}
    return {"param_groups": f"groups of {sizes[0]} parameters in the checkpoint, of {sizes[1]} in the live state"}


_LIKE_PARAMETERS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax"),
}
"""States of torch's own optimizers that have the shape of their parameter."""


def _states(value: Any) -> dict[object, dict[str, Any]]:
    """The states by parameter, of what torch's optimizers make; nothing of another value."""
    states = value.get("state") if isinstance(value, dict) else None
    plain = isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())
    return states if plain and states is not None else {}


def _with_parameters(stored: Any, optimizer: Any) -> Iterator[tuple[object, Any, dict[str, Any]]]:
    """What a stored value in the same groups calls each live parameter, the parameter, and its stored states."""
    if states := _states(stored):
        numbers = [number for group in stored["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            yield number, parameter, states.get(number, {})


def sharded_parameters(stored: Any, optimizer: Any) -> dict[str, Any]:
    """By the keys of an optimizer's stored states, the parameters that they are states of, where those are DTensors."""
    return {
        state_key(number, name): parameter
        for number, parameter, states in _with_parameters(stored, optimizer)
        if dtensors.is_dtensor(parameter)
        for name in states
    }


def other_shapes(stored: Any, optimizer: Any) -> dict[object, dict[str, str]]:
    """For each parameter of another shape than when it was saved, the keys of the states that say so, and how.

    Optimizers of other makers may keep states of any shape: they are not looked at.
    """
    bases = [f"{base.__module__}." for base in type(optimizer).__mro__ if base.__name__ != "Optimizer"]
    found: dict[object, dict[str, str]] = {}
    if any(base.startswith("torch.optim.") for base in bases):
        for number, parameter, states in _with_parameters(stored, optimizer):
            for name, ref in states.items():
                if name in _LIKE_PARAMETERS and isinstance(ref, ArrayRef) and ref.shape != tuple(parameter.shape):
                    found.setdefault(number, {})[state_key(number, name)] = (
                        f"{ref.dtype} of shape {ref.shape} in the checkpoint, "
                        f"its parameter is of shape {tuple(parameter.shape)} in the live state"
                    )
    return found


def live_where_not_restored(value: Any, live: Any) -> Any:
    """A restored value in which a parameter that has not got all its states keeps its live ones, if it has any."""
    kept = {
        number: _states(live).get(number)
        for number, states in _states(value).items()
        if any(isinstance(state, ArrayRef) for state in states.values())
    }
    if not kept:
        return value
    states = {number: kept.get(number, restored) for number, restored in value["state"].items()}
    return {**value, "state": {number: state for number, state in states.items() if state is not None}}


def fresh(ref: ArrayRef, like: Any) -> Any:
    """An array of undefined contents to restore a state into, like its parameter if that is a DTensor of its shape."""
    if like is None or ref.shape != tuple(like.shape):
        return memory.empty(ref)
    torch: Any = sys.modules["torch"]
    return torch.empty_like(like, dtype=getattr(torch, ref.dtype), requires_grad=False)


def with_all_states(stored: Any, saved: Saved) -> tuple[Any, list[tuple[object, str]]]:
    """A stored value with the states that its parameters have, too, from ranks other than the one it is of.

    Returns the value, and the parameters and states that were added.
    """
    try:
        numbers = [number for group in stored["param_groups"] for number in group["params"]]
        listed = {number: dict(states) for number, states in stored["state"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        return stored, []  # not what torch's optimizers make
    if len({tuple(listed.get(number, ())) for number in numbers}) <= 1 and (listed or not numbers):
        return stored, []  # each has what the others have
    known, states = saved.arrays(), StoredStates(saved)
    look = states.probe if listed else states.find  # without any there are no names to go by
    look([number for number in numbers if isinstance(number, (int, str))])
    added = []
    for number in numbers:
        for state, key in states.of.get(component(number), {}).items():
            if state not in listed.get(number, {}):
                listed.setdefault(number, {})[state] = known[key]
                added.append((number, state))
    return ({**stored, "state": listed}, added) if added else (stored, [])


def of_live_names(stored: Any, live: Any) -> Any:
    """A stored value by names, cut down to the live parameters, where those are in the same groups; others as they are.

    Other ranks may have had, and may have now, other parameters: what a tree says of them is not to be compared.
    """
    groups, live_groups = _names(stored), _names(live)
    if groups is None or live_groups is None or len(groups) != len(live_groups):
        return stored
    stored_in = {name: i for i, names in enumerate(groups) for name in names}
    if any(stored_in.get(name, i) != i for i, names in enumerate(live_groups) for name in names):
        return stored
    every = {name for names in live_groups for name in names}
    return {
        **stored,
        "state": {name: states for name, states in stored["state"].items() if name in every or name not in stored_in},
        "param_groups": [
            {**group, "params": list(names)} for group, names in zip(stored["param_groups"], live_groups, strict=True)
        ],
    }


def states_left_out(stored: Any, cut: Any) -> list[str]:
    """Keys of the parameters whose states :func:`of_live_names` has left out."""
    return [] if cut is stored else [join("state", name) for name in stored["state"] if name not in cut["state"]]


def _names(value: Any) -> list[list[str]] | None:
    """The parameters' names by group, of an optimizer's state by names; None for another value."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return None
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        return None
    names = [group["params"] for group in groups]
    return names if all(isinstance(name, str) for group in names for name in group) else None
