"""Which rank keeps a copy for which, and who sends what to whom."""

from __future__ import annotations

import pytest

from datastates.commit.hosts import Hosts
from datastates.commit.partners import Transfer, partners, plan


def hosts_of(machines: str, directories: str | None = None) -> Hosts:
    """Ranks by their machines, a letter each, and their directories, which are one for each machine by default."""
    where = directories or machines
    return Hosts(0, [where.index(one) for one in where], [f"{m}:/{d}" for m, d in zip(machines, where, strict=True)])


@pytest.mark.parametrize("count", range(2, 12))
def test_machines_are_partners_of_each_other(count: int) -> None:
    machines = "".join(letter * 2 for letter in "abcdefghijkl"[:count])
    found = partners(hosts_of(machines))
    assert found.keys() == {*range(2 * count)}
    assert all(machines[rank] != machines[receiver] for rank, receiver in found.items())
    assert sorted(found.values()) == [*range(2 * count)]  # each keeps one copy
    single = {rank for rank, receiver in found.items() if found[receiver] != rank}
    assert len(single) == (6 if count % 2 else 0)
    if count % 2 == 0:
        assert {abs(rank - receiver) for rank, receiver in found.items()} == {count}


def test_hosts_of_different_numbers_of_ranks() -> None:
    assert partners(hosts_of("aaab")) == {0: 3, 1: 3, 2: 3, 3: 0}


def test_directories_of_one_machine_are_no_partners() -> None:
    assert partners(hosts_of("aabb", "cdef")) == {0: 2, 1: 3, 2: 0, 3: 1}
    assert partners(hosts_of("aaaa", "cdef")) == {}


def test_who_has_received_a_container_sends_it_on() -> None:
    hosts = hosts_of("abcdefgh")
    found = plan([(0, rank) for rank in range(1, 8)], {0: [0]}, hosts)
    have, rounds = {0: 0}, dict.fromkeys(range(8), 0)
    for one in found:
        assert one.sender in have
        rounds[one.sender] = rounds[one.receiver] = max(rounds[one.sender], rounds[one.receiver]) + 1
        have[one.receiver] = rounds[one.receiver]
    assert have.keys() == {*range(8)}
    assert max(rounds.values()) == 3  # not 7


def test_the_ranks_of_a_host_share_the_sending() -> None:
    assert plan([(0, 2), (1, 3)], {0: [0], 1: [0]}, hosts_of("aabb")) == [Transfer(0, 0, 2), Transfer(1, 1, 3)]
