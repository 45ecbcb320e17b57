"""Restores a checkpoint on all ranks: of the wanted step, the newest, or the newest that is not damaged."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from datastates._base import log
from datastates._base.packing import pack, unpack
from datastates.commit import health, manifest
from datastates.commit.gathering import ElsewhereError, Gathering
from datastates.commit.partners import Transfer
from datastates.commit.tier import Listing
from datastates.errors import (
    CheckpointNotFoundError,
    CommitError,
    CorruptError,
    DatastatesError,
    FormatError,
    RanksMissingError,
    RestoreError,
)
from datastates.executor.executor import Executor
from datastates.reading.head import Head
from datastates.reading.stored import Stored
from datastates.restoring.meeting import Meeting
from datastates.restoring.request import RestoreRequest
from datastates.restoring.restore import Restore
from datastates.restoring.restored import Comparison, Restored
from datastates.state.provider import StateProvider
from datastates.storage.location import Location


def advised(tier: Listing, path: Location, request: RestoreRequest) -> contextlib.AbstractContextManager[None]:
    """Let an error about a damaged newest checkpoint name an older checkpoint that looks whole.

    It does nothing if the user asked for a step.
    """
    how = "take it with step={step}, or let fallback=True do it" if request.step is None else None
    return health.advice(tier, path, how)


def open_together(
    meeting: Meeting,
    request: RestoreRequest,
    tier: Listing,
    find: Callable[[], Location | None],
    reading: contextlib.ExitStack,
    without: Collection[Location] = (),
    gathering: Gathering | None = None,
) -> Stored | None:
    """Open the checkpoint that the coordinator finds, on all ranks, and protect it from deletion.

    Args:
        meeting: The meeting of the ranks.
        request: The request of this rank. All ranks raise an error if their requests differ.
        tier: The tier of the checkpoint.
        find: Called on the coordinator. Returns the path of the checkpoint, or None.
        reading: The protection ends when this stack is closed.
        without: As for :class:`~datastates.reading.stored.Stored`.
        gathering: As for that.

    Returns:
        The checkpoint; None if ``find`` returned None. If a rank other than the coordinator cannot protect it, the next
        stage of the meeting fails.
    """

    def pick() -> bytes:
        if (path := tier.keep(find, reading)) is None:
            return b""
        with advised(tier, path, request):
            heads = [Head.of(path, manifest.open(path))]
        for other in tier.copies(path)[1:]:
            with contextlib.suppress(DatastatesError):  # what is needed of it is missed later
                reading.enter_context(tier.protect(other))
                heads.append(Head.of(other, manifest.open(other)))
        return pack([head.encode() for head in heads])

    heads = meeting.choose(request.wish, pick)
    if not heads:
        return None
    head, *others = [_here(tier, Head.decode(one)) for one in unpack(heads)]
    stored = Stored(head, others, without, gathering)

    def keep() -> None:
        if meeting.rank:
            with contextlib.suppress(*[CheckpointNotFoundError] if others else []):
                tier.keep(lambda: stored.head.path, reading)

    meeting.begin(keep)
    return stored


def _here(tier: Listing, head: Head) -> Head:
    assert head.step is not None
    return replace(head, path=tier.here(head.path, head.step, head.attempt))


_FINE, _DAMAGED, _AWAY, _TOLD, _OTHER = range(5)


def restore(
    providers: Sequence[StateProvider],
    tier: Listing,
    candidates: Callable[[], Sequence[Location]],
    executor: Callable[[int], Executor],
    meetings: Callable[[int], Meeting],
    request: RestoreRequest,
) -> Restored | None:
    """Restore the newest of the candidates; returns None if there is none.

    Args:
        providers: The live state to restore into.
        tier: The tier of the candidates.
        candidates: Returns the checkpoints to choose from, the newest last. Called on the coordinator.
        executor: As for :class:`~datastates.restoring.restore.Restore`.
        meetings: Returns the meeting of the n-th attempt, from 0.
        request: The options of the restore.

    Raises:
        FormatError: With ``fallback``, all candidates are damaged. With several ranks it is a RestoreError.
        DatastatesError: As for :meth:`datastates.Checkpointer.restore`.
    """
    damaged: dict[Location, str] = {}  # on the coordinator
    without: set[Location] = set()  # damaged files, which lie in another place, too
    gathering = tier.gathering()

    def newest() -> Location | None:
        for path in reversed(candidates()):
            if request.fallback and path not in damaged and (what := _problem(tier, path)) is not None:
                damaged[path] = what
            if path not in damaged:
                return path
        if damaged:
            raise FormatError(f"every checkpoint is damaged: {_listed(damaged)}")
        return None

    def find() -> Location | None:
        found = newest()
        # a manifest that cannot be read for a moment has a guessed place: ask until the answer stays the same
        while request.fallback and (again := newest()) != found:
            found = again
        return found

    for attempt in itertools.count():
        meeting = meetings(attempt)
        with contextlib.ExitStack() as reading:
            stored = open_together(meeting, request, tier, find, reading, without, gathering)
            if stored is None:
                return None
            run = Restore(stored, providers, executor, meeting, request).run
            if not (request.fallback or stored.has_copies or gathering):
                with advised(tier, stored.path, request):
                    return run()
            result, error = None, None
            try:
                result = run()
            except RanksMissingError:
                raise
            except Exception as failure:
                error = failure
            again, passed = _agree(meeting, error, stored, damaged, without, gathering, older=request.fallback)
        if again:
            continue
        if result is None:
            assert error is not None
            with contextlib.nullcontext() if request.fallback else advised(tier, stored.path, request):
                raise error
        result.passed_over = passed
        if passed:
            log.warning("restored step %d, as what is newer is damaged: %s", result.step, _listed(passed))
        return result
    raise AssertionError("attempts do not end")


def compare(
    providers: Sequence[StateProvider],
    tier: Listing,
    candidates: Callable[[], Sequence[Location]],
    executor: Callable[[int], Executor],
    meeting: Meeting,
    request: RestoreRequest,
) -> Comparison | None:
    """Find out the outcome of :func:`restore` without ``fallback``; returns None if there is no candidate.

    It takes the arguments of :func:`restore`, with one meeting.
    """
    with contextlib.ExitStack() as reading:
        away = tier.gathering()
        stored = open_together(meeting, request, tier, lambda: next(reversed(candidates()), None), reading, (), away)
        if stored is None:
            return None
        with advised(tier, stored.path, request):
            return Restore(stored, providers, executor, meeting, request).compare()


def _agree(
    meeting: Meeting,
    error: Exception | None,
    stored: Stored,
    damaged: dict[Location, str],
    without: set[Location],
    gathering: Gathering | None,
    *,
    older: bool,
) -> tuple[bool, dict[str, str]]:
    """Agree after an attempt whether all ranks try again: with copies of damaged files, or with an older checkpoint.

    Containers that other hosts have are brought before.

    Args:
        meeting: The meeting of the attempt.
        error: The error of this rank; None if it could restore.
        stored: The checkpoint of the attempt.
        damaged: On the coordinator, the damaged checkpoints with the reasons; this one is added if it is damaged.
        without: The files whose copies are read; damaged ones of this checkpoint are added.
        gathering: Brings containers from other hosts, where there are such.
        older: Whether an older checkpoint is wanted, if there is no copy.

    Returns:
        Whether to try again, and the names of the checkpoints that were passed over, with the reasons.
    """

    def decide(votes: dict[int, bytes]) -> bytes:
        said = {rank: unpack(vote) for rank, vote in votes.items()}
        reasons = [
            f"rank {rank}: {text}" if len(said) > 1 else text for rank, (v, text, *_) in said.items() if v == _DAMAGED
        ]
        kinds = {vote for vote, *_ in said.values()}
        again = bool(kinds & {_DAMAGED, _AWAY}) and _OTHER not in kinds
        files = [file for vote, _, file, _ in said.values() if vote == _DAMAGED] if again else []
        needs = {rank: needed for rank, (*_, needed) in said.items() if needed}
        transfers = [] if gathering is None or not again else gathering.plan(stored.path, needs)
        if again and (transfers or _AWAY in kinds):
            files = []
            for reason in reasons if transfers else ():
                log.warning("%s is damaged, and what other hosts have is brought: %s", stored.path, reason)
        elif again and all(files):
            log.warning("%s is damaged, and is read from another place: %s", stored.path, "; ".join(reasons))
        elif again and older:
            files = []
            damaged[stored.path] = "; ".join(reasons)
            log.warning("%s is damaged, and an older checkpoint is restored: %s", stored.path, damaged[stored.path])
        else:
            again, files = False, []
        return pack([again, files, {other.name: text for other, text in damaged.items()}, [*map(list, transfers)]])

    file, needed = _file_of(error), _needed(error, stored)
    lies = file is not None and stored.is_elsewhere(file)

    def own() -> bytes:
        return pack([_vote(error), str(error), file.encode() if file is not None and lies else b"", needed])

    again, files, passed, transfers = unpack(meeting.settle("fallback", own, decide))
    without.update(map(Location.decode, files))
    if gathering is not None and again:
        gathering.bring(stored.path, [Transfer(*one) for one in transfers], needed, meeting.token("bring"))
    return again, passed


def _file_of(error: Exception | None) -> Location | None:
    """The file that an error is about."""
    name = error.path if isinstance(error, CorruptError) else getattr(error, "filename", None)
    return Location(str(name)) if name else None


def _needed(error: Exception | None, stored: Stored) -> list[int]:
    """The containers that another host may have, by the rank that wrote them: they are not here, or damaged."""
    if isinstance(error, ElsewhereError):
        return error.ranks
    file = _file_of(error) if error is not None and _vote(error) == _DAMAGED else None
    rank = None if file is None or not manifest.is_of(file, stored.path) else manifest.rank_in(file.name)
    return [] if rank is None else [rank]


def _problem(tier: Listing, path: Location) -> str | None:
    """The fault of a checkpoint; None if it looks whole in one of its places."""
    first, *others = [health.problem(one, tier=tier) for one in tier.copies(path)]
    return None if None in others else first


def _vote(error: Exception | None) -> int:
    if error is None:
        return _FINE
    if isinstance(error, ElsewhereError):
        return _AWAY
    misfit = isinstance(error, RestoreError) and (error.missing or error.unexpected or error.mismatched)
    if isinstance(error, (CommitError, RestoreError)) and not misfit:
        return _TOLD  # the rank that has failed votes on its own error
    return _DAMAGED if health.is_damage(error) else _OTHER


def _listed(damaged: dict[Location, str] | dict[str, str]) -> str:
    return "; ".join(f"{Location(path).name}: {text}" for path, text in damaged.items())
