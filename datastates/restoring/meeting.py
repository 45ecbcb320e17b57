"""What ranks that restore together agree on: the checkpoint, that it fits all of them, and that all have read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import msgpack
import numpy as np

from datastates._base.columns import U64
from datastates.errors import CommitError, RanksMissingError, RestoreError, StorageError
from datastates.ranks.world import World

_T = TypeVar("_T")
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


@dataclass(frozen=True, slots=True)
class Fit:
    """How a checkpoint fits one rank.

    Attributes:
        wanted: Hashes of the keys that this rank restores.
        names: The providers that it has, by the names they are stored under.
        is_vain: Whether nothing fits here, though something is wanted; None where nothing is wanted.
    """

    wanted: U64
    names: list[str]
    is_vain: bool | None


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
        self, stage: str, own: Callable[[], bytes], decide: Callable[[dict[int, bytes]], bytes] = lambda _: b""
    ) -> bytes:
        """Do a stage on all ranks, and go on together or not at all.

        Args:
            stage: Its name, the same on all ranks.
            own: Does this rank's part, and returns its data. What it raises is told to the other ranks.
            decide: Called on the coordinator with the data of every rank.

        Returns:
            What ``decide`` returned, on every rank.

        Raises:
            Exception: What ``own`` raised, once the others know of it.
            RestoreError: Another rank has failed at this stage, or ``decide`` has; the same on all ranks. It names the
                files that those miss.
            CommitError: The same, once the live state may have been changed.
            RanksMissingError: Some did not come in time.
        """
        error = None
        try:
            said = _FINE + own()
        except Exception as failure:
            error = failure
            said = _FAILED + _told(failure)

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

    def together(self, stage: str, action: Callable[[], _T]) -> _T:
        """Do something on all ranks, and return this rank's result; raises as :meth:`settle` does."""
        results = []

        def own() -> bytes:
            results.append(action())
            return b""

        self.settle(stage, own)
        return results[0]

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what keeps this rank from beginning, once the others know of it."""

        def fail() -> bytes:
            raise error

        self.settle("choose", fail)
        raise error

    def choose(self, wish: str, pick: Callable[[], bytes]) -> bytes:
        """Which checkpoint: what ``pick`` gives on the coordinator. All must wish for the same, in words."""

        def decide(wishes: dict[int, bytes]) -> bytes:
            if len(set(wishes.values())) > 1:
                said = ", ".join(f"rank {rank} {w.decode()}" for rank, w in sorted(wishes.items()))
                raise RestoreError(f"the ranks are to restore different steps: {said}")
            return pick()

        return self.settle("choose", wish.encode, decide)

    def compare(self, own: Callable[[], Fit], find: Callable[[U64, set[str]], list[str]]) -> tuple[list[str], bool]:
        """Whether the checkpoint fits all ranks.

        Args:
            own: Returns how it fits this rank; raises where it does not.
            find: Called on the coordinator with the hashes and the names of all ranks. Returns the keys of those names
                that no rank wants.

        Returns:
            What ``find`` returned, and whether nothing fits any rank.
        """

        def encoded() -> bytes:
            fit = own()
            return msgpack.packb([fit.wanted.tobytes(), fit.names, fit.is_vain])

        def decide(told: dict[int, bytes]) -> bytes:
            fields = [msgpack.unpackb(data) for data in told.values()]
            every = np.concatenate([np.frombuffer(hashes, np.uint64) for hashes, _, _ in fields])
            said = {vain for _, _, vain in fields}
            keys = find(every, {name for _, known, _ in fields for name in known})
            return msgpack.packb([keys, True in said and False not in said])

        answer = self.settle("compare", encoded, decide)
        self._has_begun = True
        unwanted, in_vain = msgpack.unpackb(answer)
        return unwanted, in_vain

    def finish(self, read: Callable[[], list[str]]) -> list[str]:
        """Read on all ranks. Takes and returns keys that were read without checksums: of this rank, and of any."""

        def decide(told: dict[int, bytes]) -> bytes:
            return msgpack.packb(sorted({key for data in told.values() for key in msgpack.unpackb(data)}))

        keys: list[str] = msgpack.unpackb(self.settle("finish", lambda: msgpack.packb(read()), decide))
        return keys

    def digest(
        self, held: Callable[[], Iterable[Held]], stored: Callable[[str], int | None]
    ) -> tuple[list[str], list[str]]:
        """Compare digests of what all ranks hold together with what was saved.

        Args:
            held: Returns what this rank holds.
            stored: The digest of a key as it was saved; called on the coordinator.

        Returns:
            Keys whose contents are not what was saved, and keys for which that is unknown. It is unknown where no
            digest was saved, or where the ranks do not hold all elements, each once or all alike.
        """

        def encoded() -> bytes:
            return msgpack.packb([[h.key, h.part, h.numel, h.total, h.contribution] for h in held()])

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

        wrong, unknown = msgpack.unpackb(self.settle("digest", encoded, decide))
        return wrong, unknown
