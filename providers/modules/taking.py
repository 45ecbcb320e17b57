"""How a module takes a stored state: which tensors are read in place, and which values ``load_state_dict`` is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datastates.providers.modules.load_code import LoadCode
from datastates.providers.modules.wrappers import Unwrapped, without_prefixes
from datastates.state import arrays, sharded_tensors, subclasses, together
from datastates.state.keys import component, is_inner, parts
from datastates.state.nested import leaves
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef

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
