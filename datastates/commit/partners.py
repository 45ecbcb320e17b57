"""Which ranks send files to which: copies for a partner on another machine, and what a restore needs from others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from datastates.commit.hosts import Hosts


class Transfer(NamedTuple):
    """A container of a checkpoint, by the rank that wrote it, which one rank sends to another."""

    container: int
    sender: int
    receiver: int


def partners(hosts: Hosts) -> dict[int, int]:
    """By rank, the rank on another machine that keeps a copy of its container; empty if there is one machine only.

    Machines are partners of each other, so that few pairs lose data with their joint loss. They are half of all
    machines apart in the order of the ranks, as neighbours may share a rack. Of an odd number, three form a ring.
    """
    every: dict[str, list[int]] = {}
    for rank, machine in enumerate(hosts.machines):
        every.setdefault(machine, []).append(rank)
    machines = list(every.values())
    paired = len(machines) if len(machines) % 2 == 0 else max(0, len(machines) - 3)
    found: dict[int, int] = {}
    for number, ranks in enumerate(machines if len(machines) > 1 else []):
        if number < paired:
            other = machines[(number + paired // 2) % paired]
        else:
            other = machines[paired + (number - paired + 1) % 3]
        found |= {rank: other[i % len(other)] for i, rank in enumerate(ranks)}
    return found


def plan(needs: Iterable[tuple[int, int]], holders: Mapping[int, Sequence[int]], hosts: Hosts) -> list[Transfer]:
    """The transfers of needed containers, in an order in which each rank does its own.

    Who has received one sends it on: if all need it, the time grows with the logarithm of their number.

    Args:
        needs: Containers, and the ranks that need them, which are of different directories for one container.
        holders: By container, leaders of the directories that have it; at least one.
        hosts: The ranks of each directory.
    """
    sent = dict.fromkeys(range(len(hosts.leaders)), 0)
    sources: dict[int, list[int]] = {}
    found = []
    for container, receiver in needs:
        have = sources.setdefault(container, list(holders[container]))
        groups = [rank for rank, leader in enumerate(hosts.leaders) if leader in have]
        sender = min(groups, key=lambda rank: (sent[rank], rank))
        sent[sender] += 1
        sent[receiver] = max(sent[receiver], sent[sender])
        have.append(hosts.leaders[receiver])
        found.append(Transfer(container, sender, receiver))
    return found
