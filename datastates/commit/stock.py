"""What the directories of several hosts hold together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from datastates._base.packing import pack, unpack
from datastates.commit.hosts import Hosts
from datastates.commit.names import Identity


class Known(NamedTuple):
    """A checkpoint of which some directory has the manifest.

    Attributes:
        sequence: Its number in the order of the snapshots.
        metric: How good it is; None if nobody said so.
        ranks: The number of ranks that saved it.
        holders: By the rank that wrote a container, the leaders in whose directories that is whole.
    """

    sequence: int
    metric: float | None
    ranks: int
    holders: dict[int, list[int]]

    @property
    def is_whole(self) -> bool:
        """Whether each container is somewhere."""
        return len(self.holders) == self.ranks

    def is_copied(self, hosts: Hosts) -> bool:
        """Whether each container is on two machines at least."""
        machines = hosts.machines
        return self.is_whole and all(len({machines[one] for one in have}) > 1 for have in self.holders.values())

    def elsewhere(self, rank: int, leader: int) -> list[int]:
        """The leaders of other directories than that of ``leader`` that have a container."""
        return [one for one in self.holders.get(rank, ()) if one != leader]

    def add(self, rank: int, leader: int) -> None:
        """Note that a directory has a container."""
        have = self.holders.setdefault(rank, [])
        if leader not in have:
            have.append(leader)


Held = tuple[int, str, int, "float | None", int, list[int]]
"""A checkpoint in one directory: step, attempt, sequence, metric, number of containers, and those that are there."""


class Stock(NamedTuple):
    """What all directories hold, and what is to be committed in more of them.

    Attributes:
        known: The checkpoints of which some directory has the manifest.
        behind: Checkpoints that not all directories have committed, each with a leader that has.
    """

    known: dict[Identity, Known]
    behind: list[tuple[Identity, int]]

    @classmethod
    def united(cls, told: Mapping[int, tuple[Iterable[Held], Iterable[Identity]]]) -> Stock:
        """From each leader's checkpoints, and the attempts that were interrupted there."""
        every: dict[Identity, Known] = {}
        owners: dict[Identity, list[int]] = {}
        interrupted: list[Identity] = []
        for leader, (held, partial) in sorted(told.items()):
            for step, attempt, sequence, metric, ranks, found in held:
                known = every.setdefault((step, attempt), Known(sequence, metric, ranks, {}))
                for rank in found:
                    known.add(rank, leader)
                owners.setdefault((step, attempt), []).append(leader)
            interrupted += [(step, attempt) for step, attempt in partial]
        whole = [identity for identity, one in every.items() if one.is_whole and len(owners[identity]) < len(told)]
        behind = [(i, owners[i][0]) for i in dict.fromkeys([*interrupted, *whole]) if i in owners]
        return cls(every, behind)

    def encode(self) -> bytes:
        """Encode it as bytes, to send it to other ranks."""
        known = [[*identity, *one[:-1], [*one.holders.items()]] for identity, one in self.known.items()]
        return pack([known, [[*identity, leader] for identity, leader in self.behind]])

    @classmethod
    def decode(cls, data: bytes) -> Stock:
        """Decode the bytes of :meth:`encode`."""
        known, behind = unpack(data)
        every = {(s, attempt): Known(number, m, ranks, dict(h)) for s, attempt, number, m, ranks, h in known}
        return cls(every, [((step, attempt), leader) for step, attempt, leader in behind])
