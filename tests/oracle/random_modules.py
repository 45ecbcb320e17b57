"""Random trees of modules that override and hook how they are saved and loaded, in combinations nobody thought of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import own_modules as own
import torch
from hypothesis import strategies as st
from nn_classes import Through
from subject import Subject
from torch import nn, optim
from trained import floats, training
from wrapped_modules import WRAPPERS

Hook = Callable[[nn.Module], None]


def _on_load(change: Callable[[nn.Module, Any, str], None]) -> Hook:
    return lambda module: module.register_load_state_dict_pre_hook(lambda m, s, prefix, *_: change(m, s, prefix))


def _on_state(change: Callable[[Any, Any, str], Any]) -> Hook:
    return lambda module: module._register_state_dict_hook(lambda m, s, prefix, _: change(m, s, prefix))


def _loaded(change: Callable[[Any, Any], None]) -> Hook:
    return lambda module: module.register_load_state_dict_post_hook(lambda m, keys: change(m, keys))


def _renamed(module: Any, state: Any, prefix: str) -> None:
    for key in [key for key in state if key.startswith(prefix + "old.")]:
        state[prefix + key.removeprefix(prefix + "old.")] = state.pop(key)


def _renaming(module: Any, state: Any, prefix: str) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + "old." + key.removeprefix(prefix)] = state.pop(key)


def _typed(module: Any, state: Any, prefix: str) -> None:
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, torch.Tensor) and value.is_floating_point():
            state[key] = value.double()


def _cloned(module: Any, state: Any, prefix: str) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = value.detach().clone()


def _reset(module: Any, keys: Any) -> None:
    for buffer in module.buffers():
        buffer.zero_()


def _none_buffer(module: nn.Module) -> None:
    module.register_buffer("maybe", None)


def _some_buffer(module: nn.Module) -> None:
    module.register_buffer("maybe", torch.randn(2))


def _scratch(module: nn.Module) -> None:
    module.register_buffer("scratch", torch.randn(2), persistent=False)


def _frozen(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def _view(module: nn.Module) -> None:
    module.register_buffer("whole", torch.randn(6))
    module.register_buffer("part", module.whole[1:4])


def _columns(module: nn.Module) -> None:
    module.columns = nn.Parameter(torch.randn(3, 2).t())


FEATURES: dict[str, Hook] = {
    **{f"before load {f.__name__}": _on_load(f) for f in (own._swap, own._transpose, own._double_in_place, own._drop)},
    **{f"before load {f.__name__}": _on_load(f) for f in (own._from_own, _renamed, _typed)},
    **{f"of state {f.__name__}": _on_state(f) for f in (own._add, own._cast, own._new_dict, _renaming, _cloned)},
    **{f"after load {f.__name__}": _loaded(f) for f in (own._halve, own._forgive, _reset)},
    **{f.__name__: f for f in (_none_buffer, _some_buffer, _scratch, _frozen, _view, _columns)},
}
"""By name, what is done to a module that has been made."""


@dataclass(frozen=True)
class Node:
    """One module of a tree.

    Attributes:
        kind: ``own`` for a class of a user's own; the name of a class of torch or of a wrapper; ``tied`` for the
            module before it again.
        classes: The classes that an own one inherits.
        features: Names of :data:`FEATURES`.
        children: The modules in a container.
    """

    kind: str
    classes: tuple[type[nn.Module], ...] = ()
    features: tuple[str, ...] = ()
    children: tuple[Node, ...] = ()

    def build(self) -> nn.Module:
        """A new module."""
        if self.kind == "own":
            module = type("Own", self.classes or (own.Base,), {})()
        elif self.kind in WRAPPERS:
            module = WRAPPERS[self.kind](nn.Linear(4, 4))
        elif self.kind in CONTAINERS:
            built: list[nn.Module] = []
            for child in self.children:
                built.append(built[-1] if child.kind == "tied" and built else child.build())
            module = CONTAINERS[self.kind](built)
        else:
            module = LEAVES[self.kind]()
        for feature in self.features:
            FEATURES[feature](module)
        return module

    def without(self, numbers: frozenset[int]) -> Node:
        """The tree without some features, by their numbers in the order of the walk; numbers too high do nothing."""
        count = 0

        def cut(node: Node) -> Node:
            nonlocal count
            kept = []
            for feature in node.features:
                if count not in numbers:
                    kept.append(feature)
                count += 1
            return replace(node, features=tuple(kept), children=tuple(map(cut, node.children)))

        return cut(self)


CONTAINERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "sequence": lambda built: nn.Sequential(*built),
    "list": lambda built: Through(nn.ModuleList(built)),
    "dict": lambda built: Through(nn.ModuleDict({f"{chr(97 + i)}.x"[: 1 + i % 2]: m for i, m in enumerate(built)})),
}
LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "bare": lambda: nn.Linear(4, 4, bias=False),
    "norm": lambda: nn.BatchNorm1d(4),
    "tanh": nn.Tanh,
    "tied": nn.Identity,
}
_WRAPPED = ("weight_norm", "old weight_norm", "two parametrizations", "spectral_norm", "pruned")
INNER = tuple(kind for kind in own.CLASSES if kind not in own.WHOLE)


def features() -> st.SearchStrategy[tuple[str, ...]]:
    """A few features, in any order."""
    return st.lists(st.sampled_from(sorted(FEATURES)), max_size=2, unique=True).map(tuple)


def own_nodes(classes: tuple[type[nn.Module], ...]) -> st.SearchStrategy[Node]:
    """Nodes of a user's own class."""
    picked = st.lists(st.sampled_from(classes), max_size=2, unique=True).filter(_fit).map(tuple)
    return st.builds(Node, st.just("own"), picked, features())


def _fit(classes: list[type[nn.Module]]) -> bool:
    """Whether one class can inherit them all, in that order."""
    try:
        type("Own", tuple(classes), {})
    except TypeError:
        return False
    return True


def trees() -> st.SearchStrategy[Node]:
    """Trees of modules; the outermost one is a container or of a user's own class."""
    leaves = st.one_of(own_nodes(INNER), st.builds(Node, st.sampled_from([*LEAVES, *_WRAPPED])))
    containers = st.sampled_from(sorted(CONTAINERS))
    inner = st.recursive(
        leaves,
        lambda nodes: st.builds(
            Node, containers, st.just(()), st.just(()), st.lists(nodes, min_size=1, max_size=3).map(tuple)
        ),
        max_leaves=4,
    )
    return st.one_of(inner, own_nodes(own.CLASSES))


def subject_of(tree: Node, adam: bool) -> Subject:
    """The modules of a tree, and an optimizer."""
    make = optim.AdamW if adam else None
    return training(tree.build(), [floats(3, 4)], make)
