"""A model of the commit on two hosts: whoever stops at whatever point, and whatever fails, four promises hold.

- What was said to be committed is whole after the next start.
- What was said to have failed never becomes whole.
- What one host has committed, and the other could, is whole after the next start.
- Some checkpoint is whole at any time, as the older one is deleted late.

And each rule is needed: without it, one of these breaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

BOTH = (0, 1)
LOST, BACK, BEHIND, NONE = "committed is lost", "failed is back", "not completed", "nothing is whole"
COMMITTED, FAILED, UNKNOWN = "committed", "failed", "unknown"


class State(NamedTuple):
    """Host 0 decides. ``disks``: no file, a partial folder, a part that has its name, or a part that nobody can use."""

    disks: tuple[str, str] = ("none", "none")
    older: tuple[bool, bool] = (True, True)
    at: tuple[str, str] = ("writing", "writing")
    gates: tuple[str, str] = ("open", "open")
    """Of the first and the second agreement: ``open``, ``withdrawn``, or the answer of host 0."""
    told: tuple[str, str] = ("", "")
    """What each has said of its part in the second agreement."""
    said: frozenset[str] = frozenset()

    def host(self, host: int, **values: object) -> State:
        """Change what belongs to one host."""
        new = {name: tuple(v if h == host else getattr(self, name)[h] for h in BOTH) for name, v in values.items()}
        return self._replace(**new)

    def gate(self, number: int, answer: str) -> State:
        return self._replace(gates=tuple(answer if n == number else self.gates[n] for n in BOTH))

    def end(self, host: int, report: str) -> State:
        return self.host(host, at="ended")._replace(said=self.said | {report})


def steps(state: State, rules: frozenset[str]) -> Iterator[State]:
    """Every state that one step of one host leads to."""
    for host in BOTH:
        if state.at[host] not in ("ended", "dead"):
            yield state.host(host, at="dead")
            yield from {"writing": write, "voted": vote, "prepared": publish, "named": conclude, "removing": remove}[
                state.at[host]
            ](state, host, rules)


def write(state: State, host: int, rules: frozenset[str]) -> Iterator[State]:
    yield state.host(host, at="voted", disks="partial")


def vote(state: State, host: int, rules: frozenset[str]) -> Iterator[State]:
    first, _ = state.gates
    if first == "open" and host == 0 and state.at[1] == "voted":
        yield state.host(0, at="prepared").gate(0, "prepared")
    elif first == "prepared":
        yield state.host(host, at="prepared")
        yield state.end(host, UNKNOWN)  # the answer does not arrive: it leaves its files
    else:  # nobody can decide any more
        yield state.host(host, disks="none").gate(0, "withdrawn").end(host, FAILED)


def publish(state: State, host: int, rules: frozenset[str]) -> Iterator[State]:
    named = state.host(host, disks="named")
    yield named.host(host, at="dead")
    yield named.host(host, at="named", told="fine")
    for failed in (state, named):  # before or after it has its name
        undone = failed if "who fails spoils its part" not in rules else failed.host(host, disks="spoiled")
        yield undone.host(host, at="named", told="undone")
        yield failed.host(host, at="named", told="open")


def conclude(state: State, host: int, rules: frozenset[str]) -> Iterator[State]:
    _, second = state.gates
    if second == "open":
        yield state.gate(1, "withdrawn").end(host, UNKNOWN)
        if host == 0:
            heard = {state.told[0]} if "all hosts tell first" not in rules else set(state.told)
            if "undone" in heard:
                yield state.gate(1, "undone")
            elif "open" in heard:
                yield state.gate(1, "open to all")
            elif heard == {"fine"}:
                yield state.host(0, at="removing", older=False).gate(1, "to be told")
            elif "older ones stay until all have told" not in rules:
                yield state.host(0, older=False)
    elif second == COMMITTED:
        yield state.host(host, older=False).end(host, COMMITTED)
    elif second == "undone":
        spoiled = state.host(host, disks="spoiled") if state.told[host] == "fine" else state
        yield spoiled.end(host, FAILED)
        yield state.end(host, FAILED)  # its own part stays: the other's is gone
    elif second in ("withdrawn", "open to all"):
        yield state.end(host, UNKNOWN)
    if host == 1 and second not in ("open", "withdrawn"):  # the answer does not arrive
        left = state if "who is not told leaves its part" in rules else state.host(1, disks="spoiled")
        yield left.end(1, UNKNOWN)


def remove(state: State, host: int, rules: frozenset[str]) -> Iterator[State]:
    yield state.gate(1, COMMITTED).end(0, COMMITTED)


def started(state: State, rules: frozenset[str]) -> State:
    """After the next start: all hosts tell what they have, then attempts go on, then the rest is swept."""
    swept = tuple("none" if disk == "partial" else disk for disk in state.disks)
    if "hosts tell before the sweep" not in rules:
        state = state._replace(disks=swept)
    if "attempts go on" in rules and set(state.disks) == {"partial", "named"}:
        state = state._replace(disks=("named", "named"))
    return state._replace(disks=tuple("none" if disk == "partial" else disk for disk in state.disks))


RULES = frozenset(
    {
        "who fails spoils its part",
        "all hosts tell first",
        "older ones stay until all have told",
        "who is not told leaves its part",
        "hosts tell before the sweep",
        "attempts go on",
    }
)


def broken(state: State, rules: frozenset[str]) -> set[str]:
    """The promises that a state breaks, once all have stopped."""
    after = started(state, rules)
    whole = after.disks == ("named", "named")
    breaks = {
        LOST: COMMITTED in state.said and not whole,
        BACK: FAILED in state.said and whole,
        BEHIND: set(state.disks) == {"named", "partial"} and not whole,
        NONE: not whole and after.older != (True, True),
    }
    return {promise for promise, is_broken in breaks.items() if is_broken}


def gone_through(rules: frozenset[str]) -> tuple[set[State], set[str]]:
    """All states in which both hosts have stopped, and the promises that they break."""
    seen, left, ends, breaks = {State()}, [State()], set(), set[str]()
    while left:
        state = left.pop()
        if set(state.at) <= {"ended", "dead"}:
            ends.add(state)
            breaks |= broken(state, rules)
        new = {*steps(state, rules)} - seen
        seen |= new
        left += new
    return ends, breaks


def test_the_promises_hold() -> None:
    ends, breaks = gone_through(RULES)
    assert not breaks
    assert {report for state in ends for report in state.said} == {COMMITTED, FAILED, UNKNOWN}
    assert len(ends) > 100


@pytest.mark.parametrize(
    ("rule", "promise"),
    [
        ("who fails spoils its part", BACK),
        ("all hosts tell first", LOST),
        ("older ones stay until all have told", NONE),
        ("who is not told leaves its part", LOST),
        ("hosts tell before the sweep", BEHIND),
        ("attempts go on", BEHIND),
    ],
)
def test_each_rule_is_needed(rule: str, promise: str) -> None:
    assert promise in gone_through(RULES - {rule})[1]
