"""Random optimizers: groups, orders, names, hooks, options and types of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from subject import Subject
from torch import nn, optim
from trained import total

KINDS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adamax", "Adadelta", "ASGD", "Rprop", "RAdam")
FLOAT_STATES = ("ASGD", "NAdam")
"""Classes with states of 32 bits whatever their parameters have, which torch's own load converts."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"fused": True}, {"weight_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"foreach": True}, {"fused": True}, {"betas": (0.5, 0.9)}],
    "AdamW": [{"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}],
    "RMSprop": [{"momentum": 0.9}, {"centered": True}],
}


def _note(optimizer: Any) -> None:
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": {"made": torch.ones(2), "by": "hook"}})


def _no_note(optimizer: Any) -> None:
    def hook(o: Any, state: Any) -> Any:
        o.noted = state.get("note")
        return {key: value for key, value in state.items() if key != "note"}

    optimizer.register_load_state_dict_pre_hook(hook)


def _halve_state(optimizer: Any) -> None:
    def hook(o: Any, state: Any) -> Any:
        for states in state["state"].values():
            for name, value in states.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    states[name] = value * 0.5
        return state

    optimizer.register_load_state_dict_pre_hook(hook)


def _in_place(optimizer: Any) -> None:
    def hook(o: Any, state: Any) -> None:
        for states in state["state"].values():
            for value in states.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(2)

    optimizer.register_load_state_dict_pre_hook(hook)


def _after(optimizer: Any) -> None:
    def hook(o: Any) -> None:
        o.loads = getattr(o, "loads", 0) + 1
        for group in o.param_groups:
            group["lr"] = group["lr"] * 0.5

    optimizer.register_load_state_dict_post_hook(hook)


def _own_key(optimizer: Any) -> None:
    for i, group in enumerate(optimizer.param_groups):
        group["own"] = [i, torch.full((2,), float(i)), {"k": None}]


def _own_default(optimizer: Any) -> None:
    optimizer.defaults["own"] = 3
    for group in optimizer.param_groups:
        group.setdefault("own", 4)


FEATURES: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (_note, _no_note, _halve_state, _in_place, _after, _own_key, _own_default)
}


@dataclass(frozen=True)
class Spec:
    """How an optimizer is made.

    Attributes:
        kind: Its class.
        options: Arguments for all groups.
        order: The numbers of the parameters, in the order in which they are given.
        cuts: After how many parameters another group begins.
        named: Whether the parameters are given with their names.
        tensor: Whether the rate is a tensor.
        half: Whether parameters are of 16 bits.
        frozen: Number of a parameter that gets no gradient.
        features: Names of :data:`FEATURES`.
    """

    kind: str
    options: dict[str, Any]
    order: tuple[int, ...]
    cuts: tuple[int, ...]
    named: bool
    tensor: bool
    half: bool
    frozen: int
    features: tuple[str, ...]

    def subject(self) -> Subject:
        """A module and the optimizer."""
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)).to(torch.bfloat16 if self.half else torch.float32)
        every = list(model.named_parameters())
        every[self.frozen][1].requires_grad_(False)
        given: list[Any] = [every[i] if self.named else every[i][1] for i in self.order]
        ends = sorted({*self.cuts, len(given)})
        groups = [
            {"params": given[begin:end], "lr": self._rate(0.01 * (i + 1))}
            for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]
        optimizer = getattr(optim, self.kind)(groups, lr=self._rate(0.05), **self.options)
        for feature in self.features:
            FEATURES[feature](optimizer)

        def train() -> object:
            optimizer.zero_grad()
            loss = total(model(torch.randn(3, 4, dtype=every[0][1].dtype)))
            loss.backward()
            optimizer.step()
            return loss

        return Subject({"model": model, "optimizer": optimizer}, train)

    def _rate(self, rate: float) -> Any:
        return torch.tensor(rate) if self.tensor else rate


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any optimizer."""
    kind = draw(st.sampled_from(KINDS))
    return Spec(
        kind,
        draw(st.sampled_from([{}, *OPTIONS.get(kind, [])])),
        tuple(draw(st.permutations(range(4)))),
        tuple(draw(st.lists(st.integers(1, 3), max_size=2))),
        draw(st.booleans()),
        draw(st.booleans()) and kind in ("SGD", "Adam", "AdamW", "Adagrad"),
        draw(st.booleans()) and kind not in FLOAT_STATES,
        draw(st.integers(0, 3)),
        tuple(draw(st.lists(st.sampled_from(sorted(FEATURES)), max_size=2, unique=True))),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """What is saved, and what it is restored into: often alike, else made in another way.

    Parameters in another order have a test of their own: torch gives them one another's states, and ours does not.
    """
    saved = draw(specs())
    if draw(st.booleans()):
        return saved, saved
    other = draw(specs())
    fields = {
        name: getattr(draw(st.sampled_from([saved, other])), name)
        for name in ("cuts", "named", "tensor", "frozen", "features")
    }
    fields["half"] = draw(st.booleans()) and saved.kind not in FLOAT_STATES
    other_options = draw(st.sampled_from([saved.options, *OPTIONS.get(saved.kind, [])]))
    return saved, replace(saved, options=other_options, **fields)
