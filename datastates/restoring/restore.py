"""The way up: manifest open → container → planner → executor → providers, all ranks together or none."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from datastates._base import gc_pause
from datastates._base.columns import U64
from datastates.commit import directories, health, manifest
from datastates.container import pickle_reader
from datastates.container.digests import contribution
from datastates.errors import CorruptError, RestoreError
from datastates.executor.executor import Executor
from datastates.restoring import broadcast
from datastates.restoring.meeting import Held, Meeting
from datastates.restoring.provider_view import SavedState, Trust
from datastates.restoring.reads import Reads, Tally
from datastates.restoring.stored import Head, Stored
from datastates.state import dtensors
from datastates.state.arrays import Destinations
from datastates.state.memory import note_rewritten
from datastates.state.provider import StateProvider, walk_unique
from datastates.state.shards import Shard, full_key
from datastates.state.streams import current_device

_log = logging.getLogger("datastates")

Verify = Literal["checksum", "digest"]
Replicas = Literal["read", "broadcast"]
AHEAD_MINIMUM = 16 << 20
"""Bytes of a container from which on it is begun to be read while it is compared."""


class Restored(int):
    """The step that was restored, what was left as it was, and what it took.

    Attributes:
        missing_keys: Keys that the state has and the checkpoint lacks. Of state that each rank has for itself they are
            no error: a rank that the checkpoint did not have keeps its own.
        unexpected_keys: Keys that the checkpoint has and the state lacks.
        mismatched_keys: Keys whose shape, dtype or container type differs, each with the difference.
        unverified_keys: Keys with contents that neither checksums nor a digest could be compared with.
        needed_nbytes: Bytes of the files that this rank wanted.
        read_nbytes: Bytes that it read for them.
        passed_over: With ``fallback=True``, the newer checkpoints that are damaged: what is wrong with each, by the
            names of their directories.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched_keys: dict[str, str]
    unverified_keys: list[str]
    needed_nbytes: int
    read_nbytes: int
    passed_over: dict[str, str]


@dataclass(slots=True, eq=False)
class _Compared:
    """A checkpoint beside the live state of this rank: what fits is to be read.

    Attributes:
        reads: What is to be read.
        executor: What has begun to read, if anything.
        known: The providers that the checkpoint has, each with what it holds for it.
        shards: For each of them, where it is to be restored.
        absent: Keys of providers that it lacks.
        not_here: Keys of state that it has of other ranks only.
        objects: The object shards, each with the arrays by the keys that stand for their places.
    """

    reads: Reads
    executor: Executor | None = None
    known: list[tuple[StateProvider, SavedState]] = field(default_factory=list)
    shards: list[Sequence[Shard]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    not_here: list[str] = field(default_factory=list)
    objects: list[tuple[StateProvider, SavedState, Shard, dict[str, object]]] = field(default_factory=list)

    def places(self) -> dict[broadcast.PartKey, Shard]:
        """The array shards by what they are, alike on all ranks."""
        pairs = zip(self.known, self.shards, strict=True)
        every = ((full_key(saved.name, s.key), s) for (_, saved), shards in pairs for s in shards if not s.is_object)
        return {(key, str(shard.part)): shard for key, shard in every}


def advised(path: Path, wish: int | None) -> contextlib.AbstractContextManager[None]:
    """Where nobody wished for a step, let an error that says that a checkpoint is damaged name one that looks whole."""
    if wish is not None:
        return contextlib.nullcontext()
    return health.advice(path, "take it with step={step}, or let fallback=True do it")


def open_together(
    meeting: Meeting,
    wish: int | None,
    find: Callable[[], Path | None],
    reading: contextlib.ExitStack,
    *,
    fallback: bool,
) -> Stored | None:
    """Open the checkpoint that the coordinator finds, on all ranks, and keep it from being deleted meanwhile.

    Args:
        meeting: Of the ranks.
        wish: The step that is wanted, None for the newest.
        find: Where it stands, or None; called on the coordinator.
        reading: Ends the keeping.
        fallback: Whether ``find`` passes over what is damaged.
    """

    def pick() -> bytes:
        if (path := directories.keep(find, reading)) is None:
            return b""
        with advised(path, wish):
            return Head.of(path, manifest.open(path)).encode()

    words = f"step {wish}" if wish is not None else "the newest that is whole" if fallback else "the newest"
    head = meeting.choose(words, pick)
    if not head:
        return None
    stored = Stored(Head.decode(head))
    with _told(meeting, "open"):
        if meeting.rank:
            reading.enter_context(directories.reading(stored.head.path))
    return stored


@gc_pause.paused()
def restore(
    stored: Stored,
    providers: Sequence[StateProvider],
    executor: Callable[[int], Executor],
    meeting: Meeting,
    *,
    strict: bool,
    trust: Trust,
    verify: Verify,
    replicas: Replicas,
) -> Restored:
    """Restore a checkpoint into providers, in place; everything is compared on all ranks before anything is changed.

    ``executor`` gives the executor to use, told how many bytes will be read.
    """
    with contextlib.closing(Reads()) as reads:
        alone = stored.head.ranks == meeting.ranks == 1
        compared, error, shares = _Compared(reads), None, []
        try:
            pickle_reader.check_trust(trust)
            if replicas == "read":
                _begin(compared, stored, providers, executor, meeting)
            _find(compared, stored, providers, meeting.rank, strict=strict, trust=trust)
        except Exception as failure:
            error = failure
        if replicas == "broadcast" and strict and meeting.ranks > 1:  # what does not fit all is not sent
            shares = _share(compared, meeting, error)
        try:
            if error is None:
                _compare(compared, broadcast.received(shares))
                result = _left_over(compared, stored, strict=strict, alone=alone)
        except Exception as failure:
            error = failure
        unexpected, in_vain = _unexpected(compared, stored, meeting, error, alone=alone)
        result.unexpected_keys += unexpected
        lost = {key: what for _, saved in compared.known for key, what in saved.lost.items()}
        if in_vain or (strict and result.unexpected_keys):
            raise _misfit(stored, result, lost)
        if not strict:
            _warn(stored, result, lost)
        result.missing_keys += compared.not_here
        filled, tally = _read(compared, executor, meeting)
        result.needed_nbytes, result.read_nbytes = tally.needed_nbytes, tally.read_nbytes
        doubtful = set(meeting.finish(None, tally.unverified_keys))
        if shares:
            with _told(meeting, "broadcast"):
                broadcast.broadcast(shares, compared.places())
        result.unverified_keys = _verify(compared, stored, meeting, None if verify == "digest" else doubtful)
        if doubtful.intersection(result.unverified_keys):
            keys = sorted(doubtful.intersection(result.unverified_keys))
            _log.warning("read without checksums, and no digest to compare with: %s", keys[:8])
        with _told(meeting, "objects"):
            for (provider, saved, shard, targets), is_filled in zip(compared.objects, filled, strict=True):
                provider.restore(shard, saved.structure(shard.key) if is_filled else saved.build(shard.key, targets))
        return result


@contextlib.contextmanager
def _told(meeting: Meeting, stage: str) -> Iterator[None]:
    """Tell the other ranks how something ends here: all go on, or none."""
    error = None
    try:
        yield
    except Exception as failure:
        error = failure
    meeting.settle(stage, error, b"", lambda _: b"")


def _stored_name(provider: StateProvider, ranks: int, rank: int) -> str | None:
    """What a provider's state is stored under; None for state of a rank that there was not."""
    if not provider.per_rank:
        return provider.name
    if rank >= ranks:
        return None
    return provider.name if ranks == 1 else f"{provider.name}@{rank:05d}"


def _begin(
    compared: _Compared,
    stored: Stored,
    providers: Sequence[StateProvider],
    executor: Callable[[int], Executor],
    meeting: Meeting,
) -> None:
    """Begin to read this rank's container while it is compared, where all of it will probably be wanted.

    Not where a device is in use: memory for it is page-locked first, which takes as long as to compare. Nor where a
    framework's own files make the checkpoint, which has no containers then.
    """
    head = stored.head
    if head.ranks != meeting.ranks or (head.container or head.catalog) is None or current_device() is not None:
        return
    own = stored.container(meeting.rank)
    names = {_stored_name(provider, meeting.ranks, meeting.rank) for provider in walk_unique(providers)}
    if own is not None and own.nbytes >= AHEAD_MINIMUM and names.issuperset(own.index.shards.providers):
        compared.executor = executor(own.nbytes * meeting.ranks)  # it may want what is alike on all from the others
        compared.reads.begin(own, compared.executor)


def _find(
    compared: _Compared,
    stored: Stored,
    providers: Sequence[StateProvider],
    rank: int,
    *,
    strict: bool,
    trust: Trust,
) -> None:
    for provider in walk_unique(providers):
        name = _stored_name(provider, stored.head.ranks, rank)
        base = None if name is None else stored.base(name, rank)
        if name is None or base is None:
            (compared.not_here if name is None else compared.absent).append(full_key(provider.name, ""))
            continue
        saved = SavedState(stored, base, name, strict=strict, trust=trust)
        saved.note_lost_objects(rank)
        compared.known.append((provider, saved))
        compared.shards.append(provider.destinations(saved))


def _share(compared: _Compared, meeting: Meeting, error: Exception | None) -> list[broadcast.Share]:
    """Agree on who reads what several ranks want; raises what has failed on this rank or another."""

    def wanted() -> dict[broadcast.PartKey, int]:
        if error is not None:
            raise error
        return {place: s.nbytes or 0 for place, s in compared.places().items() if broadcast.can_broadcast(s)}

    return broadcast.agree(meeting, wanted)


def _compare(compared: _Compared, received: Collection[str]) -> None:
    for (provider, saved), shards in zip(compared.known, compared.shards, strict=True):
        targets = saved.plan(shards, compared.reads, received)
        for shard in shards.objects if isinstance(shards, Destinations) else shards:
            if shard.is_object:
                saved.vet(shard.key)  # what is not trusted or damaged is refused before anything is changed
                compared.objects.append((provider, saved, shard, targets))


def _left_over(compared: _Compared, stored: Stored, *, strict: bool, alone: bool) -> Restored:
    """What does not fit; raises RestoreError for it if ``strict``, and for shared memory always."""
    saved = [s for _, s in compared.known]
    result = Restored(stored.head.step)
    result.missing_keys = [*compared.absent, *(key for s in saved for key in (*s.missing, *s.lost))]
    # of several ranks, what this one does not want may be another's
    result.unexpected_keys = [key for s in saved for key in s.unexpected] if alone else []
    result.passed_over = {}
    result.mismatched_keys = {key: what for s in saved for key, what in s.mismatched.items()}
    if strict and (result.missing_keys or result.unexpected_keys or result.mismatched_keys):
        raise _misfit(stored, result, {key: what for s in saved for key, what in s.lost.items()})
    if (keys := compared.reads.conflict()) is not None:
        raise RestoreError(
            f"{stored.head.path} does not fit the live state: {keys} shares live memory with a tensor that was saved "
            "apart from it",
            mismatched=[keys],
        )
    return result


def _unexpected(
    compared: _Compared, stored: Stored, meeting: Meeting, error: Exception | None, *, alone: bool
) -> tuple[list[str], bool]:
    """Keys that the checkpoint has and no rank wants, and whether no rank takes anything.

    Raises what fails on this rank or another.
    """
    saved = [s for _, s in compared.known]
    if not alone and error is None:
        for s in saved:
            s.want_all()

    def find(wanted: U64, names: set[str]) -> list[str]:
        return [] if alone else stored.strangers(wanted, names)

    wanted = np.array([number for s in saved for number in s.wanted], np.uint64)
    fits = any(s.takes_something for s in saved)
    is_vain = not fits if compared.absent or any(s.takes_something is not None for s in saved) else None
    return meeting.compare(error, wanted, [s.name for s in saved], is_vain, find)


def _read(compared: _Compared, executor: Callable[[int], Executor], meeting: Meeting) -> tuple[list[bool], Tally]:
    """Read everything; objects are filled in meanwhile. Other ranks hear of a failure."""
    reads = compared.reads
    try:
        reads.start(compared.executor or executor(reads.nbytes))
        try:
            filled = [saved.fill(shard.key, targets) for _, saved, shard, targets in compared.objects]
        finally:
            tally = reads.finish()
    except Exception as error:
        meeting.finish(error, ())
        raise
    finally:
        for _, saved in compared.known:
            note_rewritten(saved.rewritten)
    return filled, tally


def _verify(compared: _Compared, stored: Stored, meeting: Meeting, keys: set[str] | None) -> list[str]:
    """Compare digests of what was restored with what was saved; of some keys, or of all.

    Returns the keys of which that cannot be done.

    Raises:
        CorruptError: Contents are not what was saved; the same on all ranks.
    """
    if keys is not None and not keys:
        return []
    held, error = [], None
    try:
        held = [h for _, saved in compared.known for h in _held(saved, keys)]
    except Exception as failure:
        error = failure  # the others are not to wait for this one
    wrong, unknown = meeting.digest(error, held, stored.digest)
    if wrong:
        shown = ", ".join(map(repr, wrong[:8])) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        path = str(stored.head.path)
        raise CorruptError(f"{shown} from {path}: the contents do not match the digest", key=wrong[0], path=path)
    return unknown


def _held(saved: SavedState, keys: set[str] | None) -> Iterator[Held]:
    for shard in saved.restored:
        full = full_key(saved.name, shard.key)
        if (keys is None or full in keys) and shard.part.numel:
            local = replace(shard, source=dtensors.local(shard.source))
            yield Held(full, str(shard.part), shard.part.numel, math.prod(shard.global_shape), contribution(local))


def _misfit(stored: Stored, result: Restored, lost: dict[str, str]) -> RestoreError:
    return RestoreError(
        f"{stored.head.path} does not fit the live state: {_differences(stored, result, lost)}",
        missing=result.missing_keys,
        unexpected=result.unexpected_keys,
        mismatched=[f"{key}: {what}" for key, what in result.mismatched_keys.items()],
        lost=[str(path) for _, path in sorted(stored.lost.items())] if result.missing_keys else (),
    )


def _warn(stored: Stored, result: Restored, lost: dict[str, str]) -> None:
    """Say what is left as it was, where any of it is."""
    counts = len(result.missing_keys), len(result.unexpected_keys), len(result.mismatched_keys)
    if any(counts):
        _log.warning(
            "%s is restored in part: %d missing, %d unexpected and %d mismatched keys are left out: %s",
            *(stored.head.path, *counts, _differences(stored, result, lost)),
        )


def _differences(stored: Stored, result: Restored, lost: dict[str, str]) -> str:
    def shown(texts: Sequence[str], separator: str = ", ") -> str:
        return separator.join(texts[:8]) + (f"{separator}and {len(texts) - 8} more" if len(texts) > 8 else "")

    parts = []
    if result.missing_keys:
        files = ", ".join(path.name for _, path in sorted(stored.lost.items())[:8])
        why = f" as {files} is missing" if files else ""
        keys = [f"{key!r} ({lost[key]})" if key in lost else repr(key) for key in result.missing_keys]
        parts.append(f"the checkpoint lacks {shown(keys)}{why}")
    if result.unexpected_keys:
        parts.append(f"the live state lacks {shown(list(map(repr, result.unexpected_keys)))}")
    if result.mismatched_keys:
        parts.append(shown([f"{key!r}: {what}" for key, what in result.mismatched_keys.items()], "; "))
    return "; ".join(parts)
