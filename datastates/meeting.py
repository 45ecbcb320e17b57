"""What ranks that restore together agree on: the checkpoint, that it fits all of them, and that all have read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgpack
import numpy as np

from datastates.barrier import World
from datastates.errors import CommitError, RanksMissingError, RestoreError, StorageError
from datastates.plan import U64

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
            RestoreError: Another rank has failed at this stage, or ``decide`` has; the same on all ranks.
            CommitError: The same, once the live state may have been changed.
            RanksMissingError: Some did not come in time.
        """
        failed = None if error is None else (str(error) or type(error).__name__).encode(errors="replace")
        said = _FINE + data if failed is None else _FAILED + failed

        def outcome(told: dict[int, bytes]) -> bytes:
            reasons = [f"rank {rank}: {t[1:].decode()}" for rank, t in sorted(told.items()) if t[:1] == _FAILED]
            if reasons:
                raise (CommitError if self._has_begun else RestoreError)("; ".join(reasons))
            return decide({rank: t[1:] for rank, t in told.items()})

        try:
            return self._world.agree(
                f"{self._name}/{stage}", said, outcome, timeout=self._timeout, enough=lambda t: t[:1] == _FAILED
            )
        except (CommitError, RestoreError, RanksMissingError, StorageError) as failure:
            if error is not None:
                raise error from None
            if not isinstance(failure, CommitError) or self._has_begun:
                raise
            raise RestoreError(str(failure)) from failure

    def choose(self, wish: int | None, pick: Callable[[], bytes]) -> bytes:
        """Which checkpoint: what ``pick`` gives on the coordinator. All must wish for the same step."""

        def decide(wishes: dict[int, bytes]) -> bytes:
            if len(set(wishes.values())) > 1:
                said = ", ".join(f"rank {rank} {w.decode()}" for rank, w in sorted(wishes.items()))
                raise RestoreError(f"the ranks are to restore different steps: {said}")
            return pick()

        return self.settle("choose", None, b"the newest" if wish is None else b"step %d" % wish, decide)

    def compare(
        self,
        error: Exception | None,
        wanted: U64,
        names: Iterable[str],
        find: Callable[[U64, set[str]], list[str]],
    ) -> list[str]:
        """Whether the checkpoint fits all; returns the keys that no rank wants.

        Args:
            error: Why it does not fit this rank.
            wanted: Hashes of what this rank takes.
            names: The providers that it has, by the names they are stored under.
            find: Given what all want and have, gives the keys; called on the coordinator.
        """

        def decide(told: dict[int, bytes]) -> bytes:
            fields = [msgpack.unpackb(data) for data in told.values()]
            every = np.concatenate([np.frombuffer(hashes, np.uint64) for hashes, _ in fields])
            return msgpack.packb(find(every, {name for _, known in fields for name in known}))

        answer = self.settle("compare", error, msgpack.packb([wanted.tobytes(), list(names)]), decide)
        self._has_begun = True
        keys: list[str] = msgpack.unpackb(answer)
        return keys

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
