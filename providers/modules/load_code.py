"""Tells which tensors a module's ``load_state_dict`` only copies, and which names the module's own code handles."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from datastates._base.loaded import loaded
from datastates.state import arrays

_EXTRA_STATE = "_extra_state"
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard."
_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")
"""Names that the norms of ``torch.nn`` add or remove when they load a state of an earlier version."""


@dataclass(slots=True)
class LoadCode:
    """How a module's ``load_state_dict`` treats each name of a stored state.

    Attributes:
        copied: By name, the live tensors into which ``load_state_dict`` only copies stored tensors. A restore reads
            these in place.
        given: Names whose stored values must be given to ``load_state_dict``: extra states, and tensors that are no
            plain memory.
        prefixes: All names that begin with one of these must be given, too: their modules have hooks or methods of
            their own.
        hooked: Whether ``load_state_dict`` does more than copy, although it leaves the copied tensors alone.
    """

    copied: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    prefixes: tuple[str, ...] = ()
    hooked: bool = False

    @classmethod
    def of(cls, module: Any, names: Container[object], metadata: Mapping[str, Any]) -> LoadCode:
        """Examine a module and all modules in it.

        Args:
            module: The module. Parameters that ``fully_shard`` has gathered are sharded again.
            names: The names in the stored state.
            metadata: The stored state's ``_metadata``: by the name of a module, the version of its class.
        """
        code, root = cls(), loaded("torch").nn.Module
        if type(module).load_state_dict is not root.load_state_dict or "load_state_dict" in vars(module):
            code.prefixes = ("",)
            return code
        alone: list[Any] = []
        code._walk(module, "", "", names, metadata, alone)
        shared = {place for m in alone for tensor in _tensors(m) if (place := place_of(tensor))}
        for name, tensor in list(code.copied.items()):
            if not tensor.is_meta and (arrays.kind_of(tensor) is None or place_of(tensor) in shared):
                del code.copied[name]
                code.given.add(name)
        return code

    def _walk(
        self,
        module: Any,
        path: str,
        prefix: str,
        names: Container[object],
        metadata: Mapping[str, Any],
        alone: list[Any],
    ) -> None:
        """Examine the module at ``path``. Its names begin with ``prefix``, which lacks the wrappers on the path."""
        inner = _wrapped(module)
        if inner is not None:
            self.hooked = True
            self._walk(inner, f"{path}_checkpoint_wrapped_module.", prefix, names, metadata, alone)
            return
        known = metadata.get(path[:-1])
        version = known.get("version") if isinstance(known, dict) else None
        hooks = _hooks(module)
        if _loads_by_itself(module, prefix, names, version) or not all(map(_is_of_fully_shard, hooks)):
            self.prefixes += (prefix,)
            alone.append(module)
            return
        self.hooked |= bool(hooks)
        self.copied.update((prefix + name, tensor) for name, tensor in _own(module))
        if type(module).set_extra_state is not loaded("torch").nn.Module.set_extra_state:
            self.given.add(prefix + _EXTRA_STATE)
        for name, child in module._modules.items():
            if child is not None:
                self._walk(child, f"{path}{name}.", f"{prefix}{name}.", names, metadata, alone)

    def takes(self, name: object) -> bool:
        """Whether a value that is stored under a name must be given to ``load_state_dict``."""
        if name in self.given or "" in self.prefixes:
            return True
        return bool(self.prefixes) and isinstance(name, str) and name.startswith(self.prefixes)

    @property
    def is_plain(self) -> bool:
        """Whether ``load_state_dict`` only copies tensors: then it need not be called."""
        return not (self.given or self.prefixes or self.hooked)


def _loads_by_itself(module: Any, prefix: str, names: Container[object], version: object) -> bool:
    torch = loaded("torch")
    kind, nn = type(module), torch.nn
    if "_load_from_state_dict" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    load = kind._load_from_state_dict
    if load is nn.Module._load_from_state_dict:
        return False
    norms = (nn.modules.batchnorm._NormBase, nn.modules.instancenorm._InstanceNorm)
    if all(load is not norm._load_from_state_dict for norm in norms):
        return True
    own = {name for name, _ in _own(module)}
    return version != kind._version and any((prefix + name in names) != (name in own) for name in _OF_NORMS)


def _own(module: Any) -> Iterator[tuple[str, Any]]:
    """The parameters and persistent buffers of a module itself, by name."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def _tensors(module: Any) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()


def place_of(tensor: Any) -> int:
    """Address of a tensor's memory; 0 if it is no plain memory."""
    return 0 if arrays.kind_of(tensor) is None else arrays.address(tensor)


def _hooks(module: Any) -> list[Any]:
    every = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return [getattr(hook, "hook", hook) for hook in every]


def _is_of_fully_shard(hook: Any) -> bool:
    """Whether a hook is one of ``fully_shard``: it shards parameters again before a load, or checks them after it."""
    return str(getattr(hook, "__module__", "")).startswith(_FULLY_SHARD)


def _wrapped(module: Any) -> Any:
    """The module inside a wrapper for activation checkpoints, whose own name is not in the keys; None for others."""
    wrappers = loaded(_WRAPPERS)
    if wrappers is None or not isinstance(module, wrappers.ActivationWrapper):
        return None
    expected = wrappers.ActivationWrapper._pre_load_state_dict_hook
    hooks = [hook for hook in _hooks(module) if not _is_of_fully_shard(hook)]
    plain = type(module)._load_from_state_dict is loaded("torch").nn.Module._load_from_state_dict
    return module._checkpoint_wrapped_module if plain and hooks == [expected] else None
