"""How a module takes a stored state: which tensors are read in place, and which values ``load_state_dict`` is given."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datastates._base.loaded import loaded
from datastates.providers.modules.wrappers import Unwrapped, without_prefixes
from datastates.state import arrays, sharded_tensors, subclasses, together
from datastates.state.keys import component, is_inner, parts
from datastates.state.nested import leaves
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef

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


_ON_META = "the live tensor is on the meta device: give the module memory by to_empty(device=...) first"


@dataclass(slots=True)
class Taking:
    """How a module takes one stored state. Keys are keys within the provider.

    Attributes:
        code: Tells how the module's ``load_state_dict`` treats each name.
        saved: The saved state in the checkpoint.
        copied: The stored key of each live tensor that is read in place, by its name.
        new: New memory for the arrays that are given to ``load_state_dict``, by key.
        sharded: The live ShardedTensors, which are read in place and given to ``load_state_dict``, by key.
        added: Names that only another rank saved, each with its key there.
        prefixes: The prefixes that the module's wrappers put in front of names.
        prefix: The part of the prefixes that the stored names begin with.
        missing, unexpected, mismatched: As :meth:`~datastates.state.provider.Saved.report` takes them.
    """

    code: LoadCode
    saved: Saved
    prefixes: Sequence[str]
    prefix: str
    copied: dict[str, str] = field(default_factory=dict)
    new: dict[str, Any] = field(default_factory=dict)
    sharded: dict[str, Any] = field(default_factory=dict)
    added: dict[object, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    _live: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, wrapped: Unwrapped, live: object, stored: Any, saved: Saved, listed: Collection[str]) -> Taking:
        """Compare a module with a stored state.

        Args:
            wrapped: The module.
            live: The present result of the module's ``state_dict()``.
            stored: The stored state, with an ArrayRef for each array.
            saved: The saved state in the checkpoint.
            listed: The keys of the arrays in the stored state.
        """
        stored, prefix = without_prefixes(stored, wrapped.prefixes)
        names = stored if isinstance(stored, dict) else {}
        code = LoadCode.of(wrapped.module, names, getattr(stored, "_metadata", {}))
        taking = cls(code, saved, wrapped.prefixes, prefix)
        if not isinstance(stored, dict) and "" not in taking.code.prefixes:
            taking.mismatched[""] = f"a {type(stored).__name__} in the checkpoint, a module in the live state"
            return taking
        taking._compare(names, saved.arrays())
        if taking.code.given or taking.code.prefixes:
            taking._take_given(live, names, listed)
        return taking

    def _compare(self, stored: Mapping[Any, Any], known: Mapping[str, ArrayRef]) -> None:
        """Find the tensors to read in place, and the differences."""
        code = self.code
        for name, tensor in list(code.copied.items()):
            key, theirs = self._key(name), stored.get(name)
            if name in stored and not isinstance(theirs, ArrayRef):
                self.mismatched[key] = f"a {type(theirs).__name__} in the checkpoint, a tensor in the live state"
            elif theirs is None and key not in known:
                self.missing.append(key)
            elif tensor.is_meta:
                self.mismatched[key] = _ON_META
            elif isinstance(theirs, ArrayRef) and theirs.shape == (1,) and not tensor.ndim:  # saved by torch 0.3
                del code.copied[name]
                code.given.add(name)
            else:
                # several keys may share memory: the reference may then have another of their keys
                self.copied[name] = theirs.key if isinstance(theirs, ArrayRef) and key not in known else key
        given = (name for name in code.given if name not in stored)
        self.missing += [key for key in map(self._key, given) if key not in known]
        self.unexpected += [self._key(name) for name in stored if name not in code.copied and not code.takes(name)]

    def _key(self, name: object) -> str:
        return component(self.prefix + name if isinstance(name, str) else name)

    def _take_given(self, live: Any, stored: Mapping[Any, Any], listed: Collection[str]) -> None:
        """Allocate memory for the arrays to give to ``load_state_dict``, on the devices of the live arrays."""
        found = {key: leaf for key, leaf in leaves(live) if self._gives(key)}
        known = self.saved.arrays()
        keys = [key for key in listed if not is_inner(key) and self._gives(key.removeprefix(self.prefix))]
        for key, leaf in found.items():  # other ranks may have saved an array that this rank's state lacks
            full = self.prefix + key
            if "/" not in key and (name := parts(key)[0]) not in stored and full in known and arrays.kind_of(leaf):
                keys.append(full)
                self.added[name] = full
        devices = {t.device for _, t in leaves(live) if subclasses.is_tensor(t)}
        usual = devices.pop() if len(devices) == 1 else None
        live_at = {key: leaf for key in keys if (leaf := found.get(key.removeprefix(self.prefix))) is not None}
        self.sharded.update((key, leaf) for key, leaf in live_at.items() if sharded_tensors.is_sharded(leaf))
        whole = [key for key in keys if key not in self.sharded]
        self.new = together.fresh(self.saved, whole, live_at, usual)
        self._live = live if isinstance(live, dict) else {}

    def inside(self, composed: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Allocate memory for the arrays inside tensors to give to ``load_state_dict``, on the live tensors' devices.

        Args:
            composed: For each stored tensor that consists of others, by its key, the keys of these.
        """
        found: dict[str, Any] = {}
        for key, keys in composed.items():
            if self._gives(key.removeprefix(self.prefix)):
                live: Any = self._live.get(parts(key.removeprefix(self.prefix))[0])
                found |= together.fresh(self.saved, keys, device=live.device if subclasses.is_tensor(live) else None)
        return found

    def _gives(self, key: str) -> bool:
        try:
            return self.code.takes(parts(key.partition("/")[0])[0])
        except ValueError:
            return self.code.takes(None)  # the name is no string

    def state(self, value: Any) -> tuple[Any, bool]:
        """Make the argument for ``load_state_dict``.

        Args:
            value: The stored state, with the restored arrays, and an ArrayRef for each array that was not restored.

        Returns:
            The argument, and whether it has all of the stored state.
        """
        restored = self.saved.restored_keys()
        value, _ = without_prefixes(value, self.prefixes)
        if isinstance(value, dict):
            for name, key in self.copied.items():
                if key in restored:
                    value[name] = self.code.copied[name]
            for added, key in self.added.items():
                if key in restored:
                    value[added] = self.new[key]
            for name in filter(self.code.takes, value):
                live = self._live.get(name)
                value[name] = live if sharded_tensors.is_sharded(live) else subclasses.beside(live, value[name])
        return value, _without_holes(value, deep="" in self.code.prefixes)


def _without_holes(value: Any, *, deep: bool) -> bool:
    """Remove from a dict the entries that were not restored.

    Args:
        value: The dict, in which an ArrayRef stands for each array that was not restored.
        deep: Whether to remove single entries of inner dicts. If not, an entry is removed if any array in it was not
            restored.

    Returns:
        Whether no entry was removed.
    """
    whole = True
    for name, item in list(value.items()) if isinstance(value, dict) else ():
        if deep and isinstance(item, dict):
            whole &= _without_holes(item, deep=True)
        elif any(isinstance(leaf, ArrayRef) for _, leaf in leaves(item)):
            del value[name]
            whole = False
    return whole
