"""The agreements of all ranks in one restore: on the checkpoint, on whether it fits, and on the end of all reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from datastates._base.columns import U64
from datastates._base.packing import pack, unpack
from datastates.config import RankSettings
from datastates.errors import CommitError, RanksMissingError, RestoreError, StorageError, said
from datastates.ranks.board_world import DONE, FAILED
from datastates.ranks.world import World, refuse, settle
from datastates.storage.location import Location

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RestoredPart:
    """A part of a logical tensor that a rank has restored.

    Attributes:
        key: The full key of the tensor in the checkpoint.
        part: The part as text, which is equal for equal parts.
        numel: Number of elements of the part.
        total: Number of elements of the logical tensor.
        contribution: The part's contribution to the tensor's digest.
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
        wanted: Hashes of the full keys that this rank's providers ask for.
        names: The names under which this rank's providers are stored.
        is_vain: Whether nothing fits although something is wanted; None if nothing is wanted.
        unmatched: The globs of ``keys`` that match no key of this rank.
    """

    wanted: U64
    names: list[str]
    is_vain: bool | None
    unmatched: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Fits:
    """How a checkpoint fits all ranks.

    Attributes:
        unexpected: The full keys in the checkpoint that no rank wants.
        in_vain: Whether nothing fits on any rank although something is wanted.
    """

    unexpected: list[str]
    in_vain: bool


def _told(error: Exception) -> bytes:
    """Encode an error as a message to other ranks: its text, and the paths of the missing files that it names."""
    text = said(error) or type(error).__name__
    lost = error.lost if isinstance(error, RestoreError) else ()
    return pack([text, list(lost)])


class Meeting:
    """The agreements of all ranks in one restore. Each method waits for all ranks. Use it on one thread."""

    def __init__(self, world: World, name: str) -> None:
        """Prepare a meeting; nobody is told yet.

        Args:
            world: The ranks that restore together.
            name: Name of the restore: the same on all ranks, and used once in a run.
        """
        self._world = world
        self._name = name
        self._has_begun = False
        self._failure: Exception | None = None  # the error of begin()
        self.rank, self.ranks = world.rank, world.size

    def token(self, stage: str) -> str:
        """As :meth:`World.token`, for a stage of the restore."""
        return self._world.token(f"{self._name}/{stage}")

    def settle(
        self, stage: str, own: Callable[[], bytes], decide: Callable[[dict[int, bytes]], bytes] = lambda _: b""
    ) -> bytes:
        """Do one stage of the restore on all ranks, and go on together or not at all.

        Args:
            stage: The name of the stage, the same on all ranks.
            own: Does this rank's part, and returns its data. If it raises, the other ranks are told.
            decide: Called on the coordinator with the data of every rank, by rank, if no rank has failed.

        Returns:
            The result of ``decide``, on every rank.

        Raises:
            Exception: The error of ``own``, once the other ranks know of it. In a world of one rank, the error of
                ``decide``, too.
            RestoreError: ``own`` has failed on another rank, or ``decide`` has failed, before any live state may have
                been changed. The error's ``lost`` has the missing files that the failed ranks reported.
            CommitError: ``own`` has failed on another rank, or ``decide`` has failed, after live state may have been
                changed.
            RanksMissingError: Some ranks did not come in time.
            StorageError: The directory that the ranks meet in failed.
        """
        error = None
        try:
            if (failed := self._failure) is not None:
                self._failure = None
                raise failed
            said = DONE + own()
        except Exception as failure:
            error = failure
            said = FAILED + _told(failure)

        def outcome(told: dict[int, bytes]) -> bytes:
            failed = {rank: unpack(t[1:]) for rank, t in sorted(told.items()) if t[:1] == FAILED}
            if failed:
                reasons = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed.items())
                return FAILED + pack([reasons, sorted({file for _, lost in failed.values() for file in lost})])
            return DONE + decide({rank: t[1:] for rank, t in told.items()})

        try:
            answer = self._world.agree(f"{self._name}/{stage}", said, outcome)
        except (CommitError, RestoreError, RanksMissingError, StorageError) as failure:
            if error is not None:
                raise error from None
            if not isinstance(failure, CommitError) or self._has_begun:
                raise
            raise RestoreError(str(failure)) from failure
        if error is not None:
            raise error
        if answer[:1] == DONE:
            return answer[1:]
        reasons, lost = unpack(answer[1:])
        raise CommitError(reasons) if self._has_begun else RestoreError(reasons, lost=lost)

    def begin(self, action: Callable[[], object]) -> None:
        """Do ``action`` on this rank, before a stage. An error of ``action`` makes the next stage fail."""
        try:
            action()
        except Exception as error:
            self._failure = error

    def together(self, stage: str, action: Callable[[], _T]) -> _T:
        """Do ``action`` on all ranks, and return this rank's result; raises as :meth:`settle` does."""
        results = []

        def own() -> bytes:
            results.append(action())
            return b""

        self.settle(stage, own)
        return results[0]

    def refuse(self, error: Exception) -> NoReturn:
        """Raise ``error``, which keeps this rank from beginning, once the other ranks know of it."""

        def fail() -> bytes:
            raise error

        self.settle("choose", fail)
        raise error

    def choose(self, wish: str, pick: Callable[[], bytes]) -> bytes:
        """Choose the checkpoint; raises as :meth:`settle` does, on all ranks also if their wishes differ.

        Args:
            wish: A text of the options of this rank, which must be the same on all ranks.
            pick: Called on the coordinator. Chooses the checkpoint, and encodes the choice.

        Returns:
            The result of ``pick``, on every rank.
        """

        def decide(wishes: dict[int, bytes]) -> bytes:
            if len(set(wishes.values())) > 1:
                said = ", ".join(f"rank {rank} {w.decode()}" for rank, w in sorted(wishes.items()))
                steps = {w.partition(b" with ")[0] for w in wishes.values()}
                what = "different steps" if len(steps) > 1 else "one checkpoint in different ways"
                raise RestoreError(f"the ranks are to restore {what}: {said}")
            return pick()

        return self.settle("choose", wish.encode, decide)

    def compare(self, own: Callable[[], Fit], find: Callable[[U64, set[str]], list[str]]) -> Fits:
        """Find out whether the checkpoint fits all ranks; raises as :meth:`settle` does.

        Args:
            own: Returns how the checkpoint fits this rank, or raises an error if it does not fit.
            find: Called on the coordinator with the wanted hashes and the provider names of all ranks. Returns the
                stored keys of these providers that no rank wants.
        """

        def encoded() -> bytes:
            fit = own()
            return pack([fit.wanted.tobytes(), fit.names, fit.is_vain, sorted(fit.unmatched)])

        def decide(told: dict[int, bytes]) -> bytes:
            fields = [unpack(data) for data in told.values()]
            unmatched = set.intersection(*(set(globs) for *_, globs in fields))
            if unmatched:
                shown = ", ".join(map(repr, sorted(unmatched)))
                raise RestoreError(f"keys: nothing of the providers matches {shown}")
            every = np.concatenate([np.frombuffer(hashes, np.uint64) for hashes, *_ in fields])
            said = {vain for _, _, vain, *_ in fields}
            keys = find(every, {name for _, known, *_ in fields for name in known})
            return pack([keys, True in said and False not in said])

        answer = self.settle("compare", encoded, decide)
        self._has_begun = True
        unexpected, in_vain = unpack(answer)
        return Fits(unexpected, in_vain)

    def finish(self, read: Callable[[], list[str]]) -> list[str]:
        """Read on all ranks; raises as :meth:`settle` does.

        Args:
            read: Reads on this rank, and returns the keys that were read without checksums.

        Returns:
            The keys that any rank has read without checksums, sorted.
        """

        def decide(told: dict[int, bytes]) -> bytes:
            return pack(sorted({key for data in told.values() for key in unpack(data)}))

        keys: list[str] = unpack(self.settle("finish", lambda: pack(read()), decide))
        return keys

    def digest(
        self,
        held: Callable[[], Iterable[RestoredPart]],
        stored: Callable[[str], int | None],
        asked: Collection[str] = (),
    ) -> tuple[list[str], list[str]]:
        """Compare the digests of all restored tensors with the saved digests; raises as :meth:`settle` does.

        Args:
            held: Returns the parts that this rank has restored.
            stored: Returns the sum of the contributions that all parts of a key's tensor made to its digest when it was
                saved; None if it is unknown. Called on the coordinator.
            asked: Keys to compare, the same on all ranks.

        Returns:
            The keys whose contents differ from the saved contents, and the keys that cannot be compared. A key cannot
            be compared if it has no saved digest, if the ranks' distinct parts do not make up the tensor with each
            element once, or if no rank can compare its part.
        """

        def encoded() -> bytes:
            return pack([[h.key, h.part, h.numel, h.total, h.contribution] for h in held()])

        def decide(told: dict[int, bytes]) -> bytes:
            parts: dict[str, dict[str, set[tuple[int, int, int]]]] = {}
            for data in told.values():
                for key, part, numel, total, contribution in unpack(data):
                    parts.setdefault(key, {}).setdefault(part, set()).add((numel, total, contribution))
            wrong, unknown = [], sorted(set(asked) - parts.keys())
            for key, found in sorted(parts.items()):
                one = [next(iter(alike)) for alike in found.values()]
                expected, digest = stored(key), 0
                for _, _, contribution in one:
                    digest ^= contribution
                if any(len(alike) > 1 for alike in found.values()):
                    wrong.append(key)  # two ranks hold the same part with different contents
                elif expected is None or sum(numel for numel, _, _ in one) != one[0][1]:
                    unknown.append(key)
                elif digest != expected:
                    wrong.append(key)
            return pack([wrong, unknown])

        wrong, unknown = unpack(self.settle("digest", encoded, decide))
        return wrong, unknown


def attempts(world: World, name: str) -> Callable[[int], Meeting]:
    """A function that makes the meeting of the n-th attempt of a restore, from 0."""
    return lambda attempt: Meeting(world, f"{name}/again/{attempt}" if attempt else name)


_OWN = ("rank", "world_size", "rank_timeout")


@contextlib.contextmanager
def telling(
    directory: Callable[[], Location], options: Mapping[str, Any], tell: Callable[[World, Exception], object]
) -> Iterator[None]:
    """If the ``with`` block raises, tell the other ranks in the background. It is for code before the world is opened.

    Ranks that meet in a directory, because ``rank`` and ``world_size`` are given, are not told.

    Args:
        directory: Returns the directory where the ranks meet.
        options: The options as the user gave them; they may be wrong.
        tell: Takes part in the first agreement of the ranks, with the world and the error.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # without a message, other ranks wait for their timeout
            settings = RankSettings.of({key: value for key, value in options.items() if key in _OWN})
            if settings.rank is None and settings.world_size is None:
                cause = error
                refuse(directory(), settings.rank_timeout, lambda world: tell(world, cause))
        raise


def refuse_to_meet(name: str, world: World, error: Exception) -> None:
    """Report ``error`` to the ranks that call :func:`datastates.ranks.world.meet` or ``settle`` with ``name``."""
    settle(world, name, error, b"", lambda _: b"")


def refuse_to_restore(name: str, world: World, error: Exception) -> None:
    """Report ``error`` to the ranks that choose in a :class:`~datastates.restoring.meeting.Meeting` named ``name``."""
    Meeting(world, name).refuse(error)
