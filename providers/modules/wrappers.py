"""Takes off wrappers that have no state of their own: ``torch.compile`` and ``DistributedDataParallel``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datastates._base.loaded import loaded

_COMPILED, _PARALLEL = "_orig_mod.", "module."
_METHODS = (
    *("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"),
    *("get_extra_state", "set_extra_state"),
)


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A module without its wrappers, as far as these add nothing to its state.

    Attributes:
        module: The module. It is itself a wrapper if that has hooks, methods or tensors of its own.
        prefixes: The prefixes that the wrappers put in front of the module's names, from the outermost wrapper on.
        parallel: The ``DistributedDataParallel`` among all wrappers; None if there is none.
        ignored: Names, in the module's state, of the parameters that ``parallel`` ignores.
    """

    module: Any
    prefixes: tuple[str, ...] = ()
    parallel: Any = None
    ignored: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: Any) -> Unwrapped:
        """Take off the wrappers of a torch module."""
        prefixes: list[str] = []
        path, inner, parallel, ignored = "", module, None, []
        while prefix := _prefix_of(inner):
            path += prefix
            if prefix == _PARALLEL:
                parallel, ignored = inner, [path + name for name in inner.parameters_to_ignore]
            wrapper, inner = inner, getattr(inner, prefix.removesuffix("."))
            if wrapper is module and _adds_nothing(wrapper):
                module = inner
                prefixes.append(prefix)
        taken = "".join(prefixes)
        return cls(module, tuple(prefixes), parallel, frozenset(name.removeprefix(taken) for name in ignored))


def _prefix_of(module: Any) -> str:
    """The prefix that a wrapper puts in front of names; empty for other modules."""
    compiled = loaded("torch._dynamo.eval_frame")
    if isinstance(module, loaded("torch").nn.parallel.DistributedDataParallel):
        return _PARALLEL
    return _COMPILED if compiled is not None and isinstance(module, compiled.OptimizedModule) else ""


def _adds_nothing(wrapper: Any) -> bool:
    """Whether a wrapper's state is the state of the module in it, under names with a prefix."""
    plain, kind = loaded("torch").nn.Module, type(wrapper)
    hooks = (
        *(wrapper._state_dict_pre_hooks, wrapper._state_dict_hooks),
        *(wrapper._load_state_dict_pre_hooks, wrapper._load_state_dict_post_hooks),
    )
    own = any(name in vars(wrapper) or getattr(kind, name) is not getattr(plain, name) for name in _METHODS)
    return not (own or any(hooks) or wrapper._parameters or wrapper._buffers or len(wrapper._modules) > 1)


def without_prefixes(state: Any, prefixes: Sequence[str]) -> tuple[Any, str]:
    """Take the prefixes of wrappers off the names of a state, as far as all names have them.

    ``torch.save`` of a wrapped module's state leaves the prefixes in the names.

    Returns:
        The state, and the prefix that was taken off.
    """
    taken = ""
    for prefix in prefixes:
        if state and isinstance(state, dict) and all(isinstance(k, str) and k.startswith(prefix) for k in state):
            plain = OrderedDict((name.removeprefix(prefix), item) for name, item in state.items())
            versions = getattr(state, "_metadata", None)
            if isinstance(versions, dict):
                path = prefix.removesuffix(".")
                inner = {name: known for name, known in versions.items() if name == path or name.startswith(prefix)}
                vars(plain)["_metadata"] = {
                    name.removeprefix(path).removeprefix("."): known for name, known in inner.items()
                }
            state, taken = plain, taken + prefix
    return state, taken
