"""What ranks that restore together agree on: the checkpoint, that it fits all of them, and that all have read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import msgpack
import numpy as np

from datastates._base.columns import U64
from datastates.errors import CommitError, RanksMissingError, RestoreError, StorageError
from datastates.ranks.world import World

_FINE, _FAILED = b"+", b"-"


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank has restored of a logical tensor.

    Attributes:
        key: The full key.
        part: Which part, in words: equal words are equal parts.
        numel: Its elements.
        total: The elements of the logical tensor.
        contribution: What it contributes to the tensor's digest.
    """

    key: str
    part: str
    numel: int
    total: int
    contribution: int


def _told(error: Exception) -> bytes:
    """What other ranks are told of an error: its text, and the files that it misses."""
    text = (str(error) or type(error).__name__).encode(errors="replace").decode()
    lost = [file.encode(errors="replace").decode() for file in getattr(error, "lost", ())]
    return msgpack.packb([text, lost])


class Meeting:
    """One restore, of all ranks together. Used on the training thread; a step of it is a wait for all ranks."""

    def __init__(self, world: World, name: str, timeout: float) -> None:
        """Name it as all ranks name it; ``timeout`` in seconds for each wait."""
        self._world = world
        self._name = name
        self._timeout = timeout
        self._has_begun = False
        self.rank, self.ranks = world.rank, world.size

    def settle(
        self, stage: str, error: Exception | None, data: bytes, decide: Callable[[dict[int, bytes]], bytes]
    ) -> bytes:
        """Go on together or not at all: returns what the coordinator makes of every rank's data.

        Raises:
            Exception: ``error``, once the others know of it.
            RestoreError: Another rank has failed at this stage, or ``decide`` has; the same on all ranks. It names the
                files that those miss.
            CommitError: The same, once the live state may have been changed.
            RanksMissingError: Some did not come in time.
        """
        said = _FINE + data if error is None else _FAILED + _told(error)

        def outcome(told: dict[int, bytes]) -> bytes:
            failed = {rank: msgpack.unpackb(t[1:]) for rank, t in sorted(told.items()) if t[:1] == _FAILED}
            if failed:
                reasons = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed.items())
                return _FAILED + msgpack.packb(
                    [reasons, sorted({file for _, lost in failed.values() for file in lost})]
                )
            return _FINE + decide({rank: t[1:] for rank, t in told.items()})

        try:
            answer = self._world.agree(
                f"{self._name}/{stage}", said, outcome, timeout=self._timeout, enough=lambda t: t[:1] == _FAILED
            )
        except (CommitError, RestoreError, RanksMissingError, StorageError) as failure:
            if error is not None:
                raise error from None
            if not isinstance(failure, CommitError) or self._has_begun:
                raise
            raise RestoreError(str(failure)) from failure
        if error is not None:
            raise error
        if answer[:1] == _FINE:
            return answer[1:]
        reasons, lost = msgpack.unpackb(answer[1:])
        raise CommitError(reasons) if self._has_begun else RestoreError(reasons, lost=lost)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what keeps this rank from beginning, once the others know of it."""
        self.settle("choose", error, b"", lambda _: b"")
        raise error

    def choose(self, wish: str, pick: Callable[[], bytes]) -> bytes:
        """Which checkpoint: what ``pick`` gives on the coordinator. All must wish for the same, in words."""

        def decide(wishes: dict[int, bytes]) -> bytes:
            if len(set(wishes.values())) > 1:
                said = ", ".join(f"rank {rank} {w.decode()}" for rank, w in sorted(wishes.items()))
                raise RestoreError(f"the ranks are to restore different steps: {said}")
            return pick()

        return self.settle("choose", None, wish.encode(), decide)

    def compare(
        self,
        error: Exception | None,
        wanted: U64,
        names: Iterable[str],
        is_vain: bool | None,
        find: Callable[[U64, set[str]], list[str]],
    ) -> tuple[list[str], bool]:
        """Whether the checkpoint fits all; returns the keys that no rank wants, and whether nothing of it fits any.

        Args:
            error: Why it does not fit this rank.
            wanted: Hashes of what this rank takes.
            names: The providers that it has, by the names they are stored under.
            is_vain: Whether nothing fits here, though something is wanted; None where nothing is wanted.
            find: Given what all want and have, gives the keys; called on the coordinator.
        """

        def decide(told: dict[int, bytes]) -> bytes:
            fields = [msgpack.unpackb(data) for data in told.values()]
            every = np.concatenate([np.frombuffer(hashes, np.uint64) for hashes, _, _ in fields])
            said = {vain for _, _, vain in fields}
            keys = find(every, {name for _, known, _ in fields for name in known})
            return msgpack.packb([keys, True in said and False not in said])

        answer = self.settle("compare", error, msgpack.packb([wanted.tobytes(), list(names), is_vain]), decide)
        self._has_begun = True
        unwanted, in_vain = msgpack.unpackb(answer)
        return unwanted, in_vain

    def finish(self, error: Exception | None, doubtful: Iterable[str]) -> list[str]:
        """That all have read it; returns the keys that any rank has read without checksums."""

        def decide(told: dict[int, bytes]) -> bytes:
            return msgpack.packb(sorted({key for data in told.values() for key in msgpack.unpackb(data)}))

        keys: list[str] = msgpack.unpackb(self.settle("finish", error, msgpack.packb(list(doubtful)), decide))
        return keys

    def digest(
        self, error: Exception | None, held: Iterable[Held], stored: Callable[[str], int | None]
    ) -> tuple[list[str], list[str]]:
        """Compare digests of what all ranks hold together with what was saved.

        Args:
            error: Why this rank cannot say what it holds.
            held: What this rank holds.
            stored: The digest of a key as it was saved; called on the coordinator.

        Returns:
            Keys whose contents are not what was saved, and those of which that cannot be told: because a digest was not
            saved, or because the ranks do not hold all elements, each once or all alike.
        """

        def decide(told: dict[int, bytes]) -> bytes:
            parts: dict[str, dict[str, set[tuple[int, int, int]]]] = {}
            for data in told.values():
                for key, part, numel, total, contribution in msgpack.unpackb(data):
                    parts.setdefault(key, {}).setdefault(part, set()).add((numel, total, contribution))
            wrong, unknown = [], []
            for key, found in sorted(parts.items()):
                one = [next(iter(alike)) for alike in found.values()]
                expected, digest = stored(key), 0
                for _, _, contribution in one:
                    digest ^= contribution
                if any(len(alike) > 1 for alike in found.values()):
                    wrong.append(key)  # ranks that hold the same part hold other contents
                elif expected is None or sum(numel for numel, _, _ in one) != one[0][1]:
                    unknown.append(key)
                elif digest != expected:
                    wrong.append(key)
            return msgpack.packb([wrong, unknown])

        own = [[h.key, h.part, h.numel, h.total, h.contribution] for h in held]
        wrong, unknown = msgpack.unpackb(self.settle("digest", error, msgpack.packb(own), decide))
        return wrong, unknown
