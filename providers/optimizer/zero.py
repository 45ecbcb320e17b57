"""A provider for optimizer states that data-parallel ranks share out, as with ZeRO, keyed by logical parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from datastates.container.pickle_writer import dumps
from datastates.errors import ProviderError
from datastates.providers.optimizer.shares import Partition, Spread, WholeParameter
from datastates.providers.optimizer.state_dict_tree import groups_of
from datastates.providers.optimizer.stored_states import StoredStates
from datastates.state import arrays, memory, subclasses
from datastates.state.flat_layout import Name
from datastates.state.keys import component, state_key
from datastates.state.known_layout import Describer
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import ArrayRef, Shard, Shards, object_shard

_GROUPS = "param_groups"

Groups = Sequence[MutableMapping[str, Any]]


@dataclass
class _Found:
    """The findings of :meth:`ShardedZeroProvider.destinations` in a checkpoint.

    Attributes:
        known: The stored arrays by key.
        stored: For each parameter, as a key's component, the keys of its stored states by the states' names.
        parameters: Names in the stored parameter groups.
        shards: The shards to restore into.
        missing: Keys that only the live state has.
        unexpected: Keys that only the checkpoint has.
        mismatched: Keys that differ in another way, each with the difference as text.
    """

    known: Mapping[str, ArrayRef]
    stored: Mapping[str, Mapping[str, str]]
    parameters: set[Name] = field(default_factory=set)
    shards: list[Shard] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)

    def want(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            if shard.key in self.known:
                self.shards.append(shard)
            else:
                self.missing.append(shard.key)


class ShardedZeroProvider(StateProvider):
    """Optimizer state that data-parallel ranks share out, as in ZeRO-1, ZeRO-2 and ZeRO-3.

    Shares are saved as ranges of the logical parameters, without padding. So a checkpoint does not depend on the number
    of ranks that saved it. Keys are ``state/<parameter>/<state>``, as in a nested optimizer state dict. A checkpoint of
    ``from_stateful(name, optimizer)``, or of ``from_state_dict(name, ...)`` with the result of
    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, restores into shares of the same parameter
    names, and the other way round.

    The object ``param_groups`` holds the hyperparameters of each group and the names of its parameters. A number of the
    optimizer (``step``) is saved as an array without dimensions for each parameter, by the rank that has the
    parameter's first element. A flat partition has one number for all its parameters: a restore takes the number of the
    partition's first parameter. Torch tensors are captured lazily, because only an optimizer step changes them; NumPy
    and CuPy arrays are copied inside ``snapshot()``.

    A restore writes in place. Afterwards the optimizer has exactly the states that the checkpoint has: missing states
    are made, others are dropped.
    """

    def __init__(
        self, name: str, shares: Sequence[Partition], *, optimizer: Any = None, param_groups: Groups | None = None
    ) -> None:
        """Describe flat partitions; for ``ZeroRedundancyOptimizer`` there is :meth:`from_zero_redundancy`.

        Args:
            name: Top-level key in the checkpoint.
            shares: The shares of this rank, such as :class:`~datastates.providers.Partition`. No parameter is in two
                shares.
            optimizer: The torch optimizer that steps the shares' ``parameter``s.
            param_groups: Without an optimizer: one dict of hyperparameters and other plain values for each group,
                restored in place. By default, empty dicts.

        Raises:
            ValueError: The arguments contradict each other; the message says how.
        """
        super().__init__(name)
        self._shares = list(shares)
        if optimizer is None and any(share.parameter is not None for share in shares):
            raise ValueError(f"{name!r}: a share has a parameter, but there is no optimizer that knows it")
        if optimizer is None:
            last = max((share.group for share in shares), default=0)
            groups = [{} for _ in range(last + 1)] if param_groups is None else param_groups
            optimizer = SimpleNamespace(param_groups=groups)
        elif param_groups is not None:
            raise ValueError(f"{name!r}: an optimizer has its own param_groups")
        self._optimizer = optimizer
        self._group_names: list[list[Name]] = [[] for _ in optimizer.param_groups]
        for share in shares:
            if not 0 <= share.group < len(self._group_names):
                raise ValueError(f"{name!r}: there is no parameter group {share.group}")
            if not share.names:
                raise ValueError(f"{name!r}: a share of group {share.group} is of no parameters")
            self._group_names[share.group] += share.names
        names = [n for group in self._group_names for n in group]
        self._names = frozenset(names)
        if len(self._names) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"{name!r}: the parameter {twice!r} is in two shares")
        self._describer = Describer()
        self._forms = [share.form for share in shares]
        self._spread: Spread | None = None
        self._pending: list[tuple[Partition, dict[str, Any]]] = []

    @classmethod
    def from_zero_redundancy(
        cls, name: str, optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None = None
    ) -> ShardedZeroProvider:
        """Make a provider for a ``torch.distributed.optim.ZeroRedundancyOptimizer``, which shares out whole parameters.

        Nothing is sent between ranks: ``consolidate_state_dict`` is not needed.

        Args:
            name: Top-level key in the checkpoint.
            optimizer: The optimizer. Parameter groups that are added to it later are not saved.
            named_parameters: The model's ``named_parameters()``, whose names become the keys. By default parameters
                are numbered over all groups, as ``Optimizer.state_dict()`` does.

        Returns:
            The provider.

        Raises:
            ValueError: ``named_parameters`` lacks a parameter, or the optimizer was made with
                ``overlap_with_ddp=True`` and has not shared the parameters out yet.
        """
        if not hasattr(optimizer, "optim"):
            raise ValueError(f"{name!r}: with overlap_with_ddp, parameters are shared out in the first training steps")
        every = [p for group in optimizer.param_groups for p in group["params"]]
        names: dict[int, Name] = {id(p): i for i, p in enumerate(every)}
        if named_parameters is not None:
            names = {id(p): n for n, p in named_parameters}
            if any(id(p) not in names for p in every):
                raise ValueError(f"{name!r}: named_parameters lacks a parameter of the optimizer")
        own = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
        shares = [
            WholeParameter(names[id(p)], p if id(p) in own else None, number)
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        ]
        return cls(name, shares, optimizer=_ZeroRedundancy(optimizer))

    def _own_states(self, share: Partition) -> Mapping[str, Any]:
        """The states that the optimizer keeps for a share; empty before its first step."""
        return {} if share.parameter is None else self._optimizer.state.get(share.parameter, {})

    # --- saving

    def knowledge(self) -> object:
        """The addresses and layouts of the arrays, and the shards that the shares make of them."""
        known = self._describer.known
        return None if known is None else (self._forms, known, self._spread)

    def learn(self, knowledge: object) -> None:
        """Take the findings of an earlier provider, if its shares had the same forms."""
        assert isinstance(knowledge, tuple)
        forms, known, spread = knowledge
        if forms == self._forms:
            self._describer.known, self._spread = known, spread

    def shards(self) -> Sequence[Shard]:
        """The ranges that this rank holds, then the object ``param_groups``.

        Raises:
            ProviderError: A state is neither an array nor a number, or an array does not fit its layout.
        """
        found = list(self._states())
        tags = [f"{number}/{state}" for number, state, _ in found]
        values = [value for _, _, value in found]
        lazy = list(map(subclasses.is_tensor, values))
        rest = object_shard(_GROUPS)
        described: Sequence[Shard] | None = self._describer.again(tags, values, lambda _: lazy)
        if described is None:
            for number, state, value in found:
                if arrays.kind_of(value) is None:
                    key = state_key(self._shares[number].scalar_source, state)
                    raise ProviderError(f"{key!r} is a {type(value).__name__}, which cannot be shared out over ranks")
            described = self._describer.describe(tags, values, lazy)
        if not isinstance(described, Shards):
            return [*Spread.of(self._shares, found, described).shards, rest]
        if (spread := self._spread) is None or spread.whole is not described.layout:
            spread = self._spread = Spread.of(self._shares, found, described.layout)
        sources, versions = [values[i] for i in spread.index.tolist()], described.versions[spread.index]
        return Shards(spread.shards, sources, [rest], versions=versions, memory=described.memory)

    def _states(self) -> Iterator[tuple[int, str, Any]]:
        """Yield for each state the number of its share, its name, and its array. A Python number becomes an array."""
        for number, share in enumerate(self._shares):
            for state, value in share.tensors.items():
                yield number, state, value
            for state, value in self._own_states(share).items():
                yield number, state, np.asarray(value) if type(value) in (int, float, bool) else value

    def serialize(self, shard: Shard) -> bytes:
        """Serialize the groups as in ``Optimizer.state_dict()``, but with parameter names, and numbers for tensors."""
        del shard
        groups = zip(self._optimizer.param_groups, self._group_names, strict=True)
        return dumps([{**_hyperparameters(group), "params": names} for group, names in groups])

    # --- restoring

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        """The ranges that this rank holds now. Other ranks may have saved them."""
        states = StoredStates(saved)
        states.find([name for share in self._shares if share.parameter is not None for name in share.held])
        found = _Found(saved.arrays(), states.of)
        self._pending = []
        found.unexpected += [key for key in states.others if key.split("/")[0] != _GROUPS]
        with_groups = self._match_groups(saved, found)
        for share in self._shares:
            for state, array in share.tensors.items():
                found.want(share.destinations(state, array))
            if share.parameter is not None and with_groups:
                self._match_states(share, found)
        saved.report(missing=found.missing, unexpected=sorted(found.unexpected), mismatched=found.mismatched)
        return found.shards

    def _match_groups(self, saved: Saved, found: _Found) -> bool:
        """Find the stored hyperparameters; False if there are none, or if they do not fit the live groups."""
        objects = saved.objects()
        # a nested state dict is one object with the empty key, which has the groups in it
        key = _GROUPS if _GROUPS in objects else ""
        found.unexpected += [k for k in objects if k != key]
        if key not in objects:
            found.missing.append(_GROUPS)
            return False
        structure = saved.structure(key)
        stored = groups_of({_GROUPS: structure} if key else structure)
        if stored is None or len(stored) != len(self._group_names):
            count = "none" if stored is None else len(stored)
            found.mismatched[_GROUPS] = f"{count} in the checkpoint, {len(self._group_names)} in the live state"
            return False
        group_of = {name: i for i, group in enumerate(stored) for name in group["params"]}
        for i, names in enumerate(self._group_names):
            if moved := [name for name in names if group_of.get(name, i) != i]:
                found.mismatched[_GROUPS] = f"{moved[0]!r} is in group {group_of[moved[0]]}, in the live state in {i}"
                return False
        found.parameters = set(group_of)
        found.unexpected += self._strange(found)
        found.shards.append(object_shard(key))
        # a nested state dict may have tensors among its hyperparameters
        inner = [k for k in found.known if k.split("/")[0] == _GROUPS]
        found.shards += [arrays.destination(k, memory.empty(found.known[k])) for k in inner]
        return True

    def _match_states(self, share: Partition, found: _Found) -> None:
        """Give a share the states that are stored: arrays are read in place, numbers are set by :meth:`restore`."""
        live = self._own_states(share)
        stored: dict[str, dict[Name, ArrayRef]] = {}
        for name in share.names:
            for state, key in found.stored.get(component(name), {}).items():
                if state not in share.tensors:
                    stored.setdefault(state, {})[name] = found.known[key]
        states: dict[str, Any] = {}
        for state, refs in stored.items():
            value = live.get(state)
            if value is not None and arrays.kind_of(value) is not None and value.ndim:
                found.want(share.destinations(state, value))
            elif value is None and not share.is_scalar(state, refs):
                value = share.fresh(next(iter(refs.values())))
                found.want(share.destinations(state, value))
            else:
                name = share.scalar_source if share.scalar_source in refs else next(iter(refs))
                value = memory.empty(refs[name])
                if value.ndim:
                    found.mismatched[state_key(name, state)] = f"an array of shape {tuple(value.shape)}, not a number"
                    continue
                found.want([arrays.destination(state_key(name, state), value)])
                # one number serves the whole share; the other parameters' are read, too, or they would be unexpected
                others = [n for n in share.held if n in refs and n != name]
                found.want(arrays.destination(state_key(n, state), memory.empty(refs[n])) for n in others)
            states[state] = value
        if not states and found.parameters.isdisjoint(share.names):
            found.missing += [f"state/{component(name)}" for name in share.names]
            return
        self._pending.append((share, states))

    def _strange(self, found: _Found) -> list[str]:
        """Stored keys of parameters that are in no share, and of states that a share without an optimizer lacks.

        Parameters outside of the stored groups are ignored: they belong to another pipeline stage.
        """
        keys: list[str] = []
        for name in found.parameters - self._names:
            keys += found.stored.get(component(name), {"": f"state/{component(name)}"}).values()
        for share in self._shares:
            if share.parameter is None and share.tensors:
                stored = [found.stored.get(component(name), {}) for name in share.names]
                keys += [key for states in stored for state, key in states.items() if state not in share.tensors]
        return keys

    def restore(self, shard: Shard, value: Any) -> None:
        """Put the hyperparameters into the live groups, and the states into the optimizer's ``state``."""
        stored = value if shard.key == _GROUPS else value[_GROUPS]
        for group, new in zip(self._optimizer.param_groups, stored, strict=True):
            group.update({key: _settled(group.get(key), item) for key, item in new.items() if key != "params"})
        for share, states in self._pending:
            every = self._optimizer.state
            live = every[share.parameter] if states else every.pop(share.parameter, {})
            for gone in [state for state in live if state not in states]:
                del live[gone]
            group = self._optimizer.param_groups[share.group]
            for state, new in states.items():
                live[state] = new if new.ndim else _number(live.get(state), new, state, share.parameter, group)
        self._pending = []


@dataclass
class _ZeroRedundancy:
    """A ``ZeroRedundancyOptimizer`` as a plain optimizer: its own groups, and the states of the optimizer inside it."""

    optimizer: Any

    @property
    def param_groups(self) -> Groups:
        """The groups of the outer optimizer, which each step copies to the optimizer inside it."""
        groups: Groups = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The states of this rank's parameters."""
        states: MutableMapping[Any, Any] = self.optimizer.optim.state
        return states


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(key, value) for key, value in group.items() if key != "params"}


def _plain(key: str, value: Any) -> Any:
    """Replace tensors by numbers in a hyperparameter. As shards, they would have the same key on several ranks."""
    if type(value) in (tuple, list):
        return type(value)([_plain(key, item) for item in value])
    if arrays.kind_of(value) is None:
        return value
    if value.ndim:
        raise ProviderError(f"{_GROUPS}: {key!r} is an array of shape {tuple(value.shape)}, not a number")
    return value.item()


def _settled(live: Any, stored: Any) -> Any:
    """The value that a live hyperparameter gets from a stored one. A live tensor is filled and kept."""
    if type(live) in (tuple, list) and type(stored) in (tuple, list) and len(live) == len(stored):
        return type(live)([_settled(a, b) for a, b in zip(live, stored, strict=True)])
    stored = stored.item() if arrays.kind_of(stored) is not None else stored
    if arrays.kind_of(live) is None:
        return stored
    live.fill_(stored)
    return live


def _number(live: Any, stored: Any, state: str, parameter: Any, group: Mapping[str, Any]) -> Any:
    """The value that an optimizer's number gets: of the live number's type if there is one, else as it was saved."""
    if arrays.kind_of(live) is not None:
        live.fill_(stored.item())
        return live
    if live is not None or arrays.kind_of(stored) == "numpy":
        return stored.item() if live is None else type(live)(stored.item())
    # torch's own rule: steps stay on the host unless a kernel reads them
    on_host = state == "step" and not (group.get("capturable") or group.get("fused"))
    return stored if on_host else stored.to(parameter.device)
