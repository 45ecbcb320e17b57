"""Agreement between ranks without collectives: each rank posts a message, rank 0 decides, all ranks read its answer.

Messages are exchanged over a :class:`Board`: a framework's store or a shared directory. This module does not interpret
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from datastates._base import faults
from datastates.errors import (
    ClosedError,
    CommitError,
    DatastatesError,
    RanksMissingError,
    StorageError,
    UnreachableError,
    rank_names,
    said,
    storage_errors,
)
from datastates.ranks.keys import Place
from datastates.ranks.polling import slowest, until

COORDINATOR = 0

MOST_TOLD = 4
"""Agreements whose boxes may stay as long as rank 0 never waits for the others."""

Decide = Callable[[dict[int, bytes]], bytes]


DONE, FAILED = b"+", b"-"
"""First bytes of payloads. On a payload that begins with ``FAILED``, rank 0 decides without waiting for the others."""


def text_of(error: BaseException) -> str:
    """The text about an error of this rank that is sent to the other ranks."""
    kind, text = type(error).__name__, said(error)
    return kind if not text else text if isinstance(error, DatastatesError) else f"{kind}: {text}"


def token_of(run: str, name: str) -> str:
    """8 hexadecimal digits for a name, the same on all ranks of a run and different in other runs."""
    return hashlib.blake2b(f"{run}/{name}".encode(), digest_size=4).hexdigest()


class Board(Protocol):
    """Named boxes through which ranks exchange messages. Each rank may leave one message in a box.

    A rank can also leave a mark in a box. Marks are counted; :meth:`put` leaves one, too. No method waits for another
    rank. All are thread-safe, and raise CommitError or StorageError when the board fails.
    """

    @property
    def run(self) -> str:
        """The random name of this run, the same on all ranks."""

    def put(self, box: str, data: bytes) -> None:
        """Leave this rank's message and its mark in a box."""

    def mark(self, box: str) -> None:
        """Leave this rank's mark in a box, without a message."""

    def marks(self, box: str) -> int:
        """The number of ranks that have left a mark. The message of a rank that called :meth:`put` is there by then."""

    def read(self, box: str, ranks: Iterable[int]) -> dict[int, bytes]:
        """The messages that any of these ``ranks`` left, by rank. No rank may delete them during the call."""

    def claim(self, box: str) -> int:
        """Claim a box; returns the rank that claimed it first, which may be this one."""

    def take_back(self, box: str) -> None:
        """Delete this rank's message from a box."""

    def drop(self, box: str, ranks: Iterable[int]) -> None:
        """Delete a box: its marks, its claim, and the messages of these ranks."""

    def close(self, *, given_up: bool) -> None:
        """Close the board; on rank 0, delete what the run left there. ``given_up``: an agreement lacked a rank."""


# the first byte of an answer
_DECIDED, _REFUSED, _MISSING = b"d", b"r", b"m"


def _sealed(failure: BaseException) -> bytes:
    if isinstance(failure, RanksMissingError):
        return _MISSING + json.dumps({"text": str(failure), "ranks": failure.ranks}).encode()
    return _REFUSED + text_of(failure).encode(errors="replace")


def _opened(answer: bytes) -> bytes:
    kind, content = answer[:1], answer[1:]
    if kind == _MISSING:
        told = json.loads(content)
        raise RanksMissingError(told["text"], ranks=told["ranks"])
    if kind == _REFUSED:
        raise CommitError(content.decode())
    return content


def _pass(point: str, name: str) -> None:
    with storage_errors(point, name):
        faults.hit(f"barrier.{point}", name)


class BoardWorld:
    """Several ranks over a board.

    Each agreement uses five boxes, named after it:

    - ``votes``: every rank's payload.
    - ``enough``: marked by a rank that has failed, so that rank 0 decides without waiting for the others.
    - ``gate``: claimed by rank 0 when it decides, or by a rank that stops waiting. If that rank claims it first,
      nothing is decided.
    - ``answer``: the decision of rank 0.
    - ``read``: marked by each rank that is done with this agreement. When all are, rank 0 deletes the boxes.
    """

    def __init__(self, rank: int, size: int, board: Board, *, timeout: float, place: Place | None = None) -> None:
        """Take part in the agreements of several ranks.

        Args:
            rank: The number of this rank.
            size: The number of ranks.
            board: The board on which the ranks exchange messages.
            timeout: Seconds that one wait may take.
            place: The framework's store that holds the board; None for a board elsewhere.
        """
        self.rank, self.size, self.place = rank, size, place
        self._board = board
        self.timeout = timeout
        self._interval = slowest(size)
        self._others = range(COORDINATOR + 1, size)
        self._process = os.getpid()
        self._closed = False
        self._missed = False
        """Whether an agreement of this world lacked a rank."""
        self._lock = threading.Lock()
        self._told: dict[str, bool] = {}
        """On rank 0: each answer that some rank may not have read yet, by name, and whether ``decide`` succeeded."""

    def token(self, name: str) -> str:
        """See :meth:`datastates.ranks.world.World.token`."""
        self._refuse_strangers()
        return token_of(self._board.run, name)

    def agree(self, name: str, payload: bytes, decide: Decide) -> bytes:
        """See :meth:`datastates.ranks.world.World.agree`."""
        self._refuse_strangers()
        try:
            if self.rank == COORDINATOR:
                return self._bring_together(name, payload, decide)
            return self._take_part(name, payload)
        except RanksMissingError:
            self._missed = True
            raise

    def _refuse_strangers(self) -> None:
        if os.getpid() != self._process:
            raise CommitError(f"this process was forked off rank {self.rank} and is no rank of its own")
        if self._closed:
            raise ClosedError("the world of ranks is closed")

    # --- rank 0

    def _bring_together(self, name: str, payload: bytes, decide: Decide) -> bytes:
        failure: BaseException | None = None
        try:
            votes = self._gather(name, payload)
            _pass("decide", name)
            answer = _DECIDED + decide(votes)
        except BaseException as error:  # even an interrupt: the other ranks must get an answer
            failure, answer = error, _sealed(error)
        _pass("publish", name)
        try:
            self._board.put(f"{name}.answer", answer)
        except (CommitError, StorageError):
            if failure is None:
                raise
        else:
            with self._lock:
                self._told[name] = failure is None
        if failure is None:
            return answer[1:]
        if isinstance(failure, RanksMissingError | UnreachableError) or not isinstance(failure, Exception):
            raise failure
        raise CommitError(text_of(failure)) from failure

    def _gather(self, name: str, payload: bytes) -> dict[int, bytes]:
        # rank 0 stops waiting early, so that the others still hear in time which ranks are missing
        patience = self.timeout - min(self.timeout / 5, 30.0)
        votes = f"{name}.votes"

        def come() -> bool | None:
            all_there = self._board.marks(votes) >= len(self._others)
            return all_there or self._board.marks(f"{name}.enough") > 0 or None

        end = time.monotonic() + patience
        waits = not payload.startswith(FAILED) and come() is None
        if waits or len(self._told) > MOST_TOLD:
            self._delete_what_all_have_read()
        if waits:
            until(come, end, self._interval)
        found = {COORDINATOR: payload, **self._board.read(votes, self._others)}
        missing = [rank for rank in self._others if rank not in found]
        if missing and not any(vote.startswith(FAILED) for vote in found.values()):
            raise RanksMissingError(
                f"{name}: no answer from {rank_names(missing)} within {patience:.3g} s", ranks=missing
            )
        first = self._board.claim(f"{name}.gate")
        if first != COORDINATOR:
            raise RanksMissingError(f"{name}: rank {first} stopped waiting for an answer", ranks=(first,))
        return found

    def _delete_what_all_have_read(self) -> bool:
        """Delete the boxes that all ranks are done with; returns whether none are left."""
        with self._lock:
            told = dict(self._told)
        for name, decided in told.items():
            if self._board.marks(f"{name}.read") >= len(self._others):
                with self._lock:
                    mine = self._told.pop(name, None) is not None
                if mine:
                    self._drop(name, decided)
        return not self._told

    def _drop(self, name: str, decided: bool) -> None:
        # after a decision, the ranks have deleted their votes themselves
        left = () if decided else self._others
        for box, ranks in (("votes", left), ("answer", (COORDINATOR,)), ("enough", ()), ("gate", ()), ("read", ())):
            self._board.drop(f"{name}.{box}", ranks)

    # --- the other ranks

    def _take_part(self, name: str, payload: bytes) -> bytes:
        end = time.monotonic() + self.timeout
        _pass("post", name)
        self._board.put(f"{name}.votes", payload)
        if payload.startswith(FAILED):
            self._board.mark(f"{name}.enough")
        answer = None
        try:
            _pass("wait", name)
            answer = self._await_answer(name, end)
        finally:
            # failures from here on do not matter: rank 0 may have ended already, once the answer was read
            with contextlib.suppress(CommitError, StorageError):
                if answer is not None:
                    self._board.take_back(f"{name}.votes")
                self._board.mark(f"{name}.read")
        return _opened(answer)

    def _await_answer(self, name: str, end: float) -> bytes:
        def look() -> bytes | None:
            return self._board.read(f"{name}.answer", (COORDINATOR,)).get(COORDINATOR)

        answer = until(look, end, self._interval)
        if answer is None:
            if self._board.claim(f"{name}.gate") != COORDINATOR:
                text = f"no answer from rank {COORDINATOR}, which the others report to, within {self.timeout:.3g} s"
                # rank 0 will find the gate claimed, and cannot decide
                raise RanksMissingError(f"{name}: {text}", ranks=(COORDINATOR,), undecided=True)
            answer = until(look, time.monotonic() + self.timeout, self._interval)
        if answer is None:
            text = f"rank {COORDINATOR} heard all and has not told within {2 * self.timeout:.3g} s what came of it"
            raise RanksMissingError(f"{name}: {text}", ranks=(COORDINATOR,))
        return answer

    def close(self) -> None:
        """See :meth:`datastates.ranks.world.World.close`. Does nothing in a forked child."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        # if the server of the board is gone, nothing is left to delete or to wait for
        with contextlib.suppress(CommitError):
            try:
                if self.rank == COORDINATOR:
                    self._clear()
            finally:
                self._board.close(given_up=self._missed)

    def _clear(self) -> None:
        end = time.monotonic() + self.timeout
        until(lambda: self._delete_what_all_have_read() or None, end, self._interval)
        for name in self._told:
            self._drop(name, decided=False)
