"""Wrappers whose state is that of the module in them: ``torch.compile`` and ``DistributedDataParallel``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datastates._base.loaded import loaded

_COMPILED, _PARALLEL = "_orig_mod.", "module."


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A module without its wrappers.

    Attributes:
        module: The module.
        prefixes: What the wrappers put in front of its names, from the outermost to the innermost.
        parallel: The ``DistributedDataParallel`` among the wrappers; None if there is none.
    """

    module: Any
    prefixes: tuple[str, ...] = ()
    parallel: Any = None

    @classmethod
    def of(cls, module: Any) -> Unwrapped:
        """Take off the wrappers of a module of torch."""
        compiled, parallel = loaded("torch._dynamo.eval_frame"), None
        prefixes: list[str] = []
        while True:
            if isinstance(module, loaded("torch").nn.parallel.DistributedDataParallel):
                parallel, module = module, module.module
                prefixes.append(_PARALLEL)
            elif compiled is not None and isinstance(module, compiled.OptimizedModule):
                module = module._orig_mod
                prefixes.append(_COMPILED)
            else:
                return cls(module, tuple(prefixes), parallel)


def without_prefixes(state: Any, prefixes: Sequence[str]) -> tuple[Any, str]:
    """A state with the names that the module without its wrappers has, and what was taken off all of its names.

    ``torch.save`` of a wrapped module leaves the prefixes in the names.
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
