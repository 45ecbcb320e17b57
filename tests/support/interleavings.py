"""Runs several actors over one store of objects in every order of their requests, with lost and late answers.

An actor is ordinary code. It runs from its beginning with the answers that it was given so far, up to the first request
that has none yet. Its next request depends on these answers alone, so each sequence of answers is run once, and a step
of an actor is one request. States that were seen before are not gone through again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from memory_store import MemoryStore

from datastates.errors import StorageError, UncertainError
from datastates.storage import Entry, Location

Call = tuple[Any, ...]
Objects = frozenset[tuple[str, bytes, int]]
"""Name, bytes and time of each object."""
DAY = 86_400


class _Pause(BaseException):
    """Ends an actor at a request that has no answer yet."""


class Script(MemoryStore):
    """Answers the requests of an actor from a list, and stops it at the first one that is not in there."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []
        self.asked: Call | None = None
        self._at = 0

    def start(self, answers: list[Any]) -> None:
        self.answers, self.asked, self._at = answers, None, 0

    def ask(self, *call: Any) -> Any:
        if self.asked is None and self._at == len(self.answers):
            self.asked = call
        if self.asked is not None:
            raise _Pause
        self._at += 1
        answer = self.answers[self._at - 1]
        if isinstance(answer, tuple) and answer[:1] == ("raise",):
            kind, number = answer[1:]
            raise kind(number, call[0], str(call[1]))
        return answer

    def look(self, path: Location) -> Entry | None:
        found = self.ask("look", str(path))
        return None if found is None else Entry(*found, None)

    def is_file(self, path: Location) -> bool:
        return self.look(path) is not None

    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        return {name: Entry(*found, None) for name, *found in self.ask("list", str(folder), deep)}

    def read_all(self, path: Location, most: int | None = None) -> bytes:
        return self.ask("read", str(path))

    def create(self, path: Location, data: bytes) -> None:
        self.ask("create", str(path), data)

    def replace(self, path: Location, data: bytes) -> None:
        self.ask("replace", str(path), data)

    def discard(self, paths: Sequence[Location]) -> None:
        if paths:
            self.ask("discard", *map(str, paths))

    def now(self, path: Location) -> int:
        return self.ask("now")

    def clock(self) -> int:
        """The time of a process, in seconds."""
        return self.ask("clock")

    def say(self, word: str) -> None:
        """Report something for good."""
        self.ask("say", word)


class State(NamedTuple):
    """Everything that later steps depend on."""

    objects: Objects
    time: int
    late: frozenset[tuple[str, bytes]]  # creates that may still be done
    faults: int
    passes: tuple[int, ...]  # times that may still pass, in seconds
    said: frozenset[tuple[str, str]]
    at: tuple[int, ...]  # for each actor, the node of its answers; -1 for one that has ended


@dataclass
class _Node:
    """The answers that an actor was given, and its next request; None where it has ended."""

    answers: list[Any]
    call: Call | None
    children: dict[Any, int] = field(default_factory=dict)


class Interleavings:
    """All interleavings of some actors."""

    def __init__(
        self,
        store: Script,
        actors: dict[str, Callable[[], None]],
        *,
        faults: int = 0,
        passes: tuple[int, ...] = (),
        overwrites: bool = False,
        decides: Callable[[str], bool],
        marks: str = "",
        objects: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Take the actors; nothing is run yet.

        Args:
            store: The store that the actors ask.
            actors: Each actor by its name.
            faults: How many answers to creates are lost at most.
            passes: Times that pass at any moment, in seconds. After one of a week, nothing late is done any more.
            overwrites: Whether a create overwrites, as it must not.
            decides: Whether the answer to a create of a name may be lost.
            marks: The ending of names whose creation counts as said.
            objects: What lies in the store at first.
        """
        self._store = store
        self._actors = list(actors.items())
        self._overwrites = overwrites
        self._decides = decides
        self._marks = marks
        self._nodes: list[_Node] = []
        begin = tuple(self._node(number, []) for number in range(len(actors)))
        there = frozenset((name, data, 0) for name, data in objects.items())
        self._first = State(there, 0, frozenset(), faults, passes, frozenset(), begin)

    def _node(self, number: int, answers: list[Any]) -> int:
        self._store.start(answers)
        try:
            self._actors[number][1]()
        except _Pause:
            assert self._store.asked is not None
            self._nodes.append(_Node(answers, self._store.asked))
            return len(self._nodes) - 1
        return -1

    def states(self) -> Iterator[State]:
        """Each state once."""
        seen, todo = {self._first}, [self._first]
        while todo:
            state = todo.pop()
            yield state
            for after in self._after(state):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)

    def _after(self, state: State) -> Iterator[State]:
        for number, node in enumerate(state.at):
            if node >= 0:
                yield from self._steps(state, number, self._nodes[node])
        for name, data in state.late:
            left = state.late - {(name, data)}
            yield state._replace(objects=self._created(state, name, data)[0], late=left)
        for seconds in set(state.passes):
            rest = list(state.passes)
            rest.remove(seconds)
            late = frozenset() if seconds >= 7 * DAY else state.late
            yield state._replace(time=state.time + seconds, passes=tuple(rest), late=late)

    def _steps(self, state: State, number: int, node: _Node) -> Iterator[State]:
        """The states after the next request of an actor. What it asks its own clock for is part of that."""
        while node.call is not None and node.call[0] in ("clock", "say"):
            answer = state.time if node.call[0] == "clock" else None
            if node.call[0] == "say":
                state = state._replace(said=state.said | {(self._actors[number][0], node.call[1])})
            state, reached = self._moved(state, number, node, answer)
            if reached is None:
                yield state
                return
            node = reached
        call = node.call
        assert call is not None
        if call[0] == "create":
            objects, answer = self._created(state, call[1], call[2])
            if self._marks and call[1].endswith(self._marks):
                state = state._replace(said=state.said | {("", self._marks)})
            yield self._moved(state._replace(objects=objects), number, node, answer)[0]
            if state.faults and self._decides(call[1]):
                lost = ("raise", UncertainError, 0)
                less = state._replace(faults=state.faults - 1)
                late = state.late | {(call[1], call[2])}
                for made in {state.objects, objects}:
                    yield self._moved(less._replace(objects=made, late=late), number, node, lost)[0]
            return
        objects, answer = self._done(state, call)
        yield self._moved(state._replace(objects=objects), number, node, answer)[0]

    def _moved(self, state: State, number: int, node: _Node, answer: Any) -> tuple[State, _Node | None]:
        """The state after an answer, and where the actor is then."""
        if answer not in node.children:
            node.children[answer] = self._node(number, [*node.answers, answer])
        reached = node.children[answer]
        at = (*state.at[:number], reached, *state.at[number + 1 :])
        return state._replace(at=at), None if reached < 0 else self._nodes[reached]

    def _created(self, state: State, name: str, data: bytes) -> tuple[Objects, Any]:
        if any(one[0] == name for one in state.objects):
            if not self._overwrites:
                return state.objects, ("raise", StorageError, errno.EEXIST)
            return self._put(state, name, data), None
        return self._put(state, name, data), None

    def _put(self, state: State, name: str, data: bytes) -> Objects:
        return frozenset(one for one in state.objects if one[0] != name) | {(name, data, state.time * 10**9)}

    def _done(self, state: State, call: Call) -> tuple[Objects, Any]:
        """What a request changes, and its answer."""
        operation, *words = call
        if operation == "replace":
            return self._put(state, *words), None
        if operation == "discard":
            return frozenset(one for one in state.objects if one[0] not in words), None
        if operation == "now":
            return state.objects, state.time * 10**9
        if operation == "list":
            return state.objects, self._listed(state, *words)
        found = next((one for one in state.objects if one[0] == words[0]), None)
        if operation == "look":
            return state.objects, None if found is None else ("file", len(found[1]), found[2])
        return state.objects, ("raise", StorageError, errno.ENOENT) if found is None else found[1]

    def _listed(self, state: State, folder: str, deep: bool) -> tuple[tuple[str, str, int, int], ...]:
        below: dict[str, tuple[str, str, int, int]] = {}
        for name, data, time in state.objects:
            if name.startswith(f"{folder}/"):
                first, _, rest = name[len(folder) + 1 :].partition("/")
                if rest and not deep:
                    below[first] = (first, "folder", 0, 0)
                else:
                    whole = name[len(folder) + 1 :]
                    below[whole] = (whole, "file", len(data), time)
        return tuple(sorted(below.values()))
