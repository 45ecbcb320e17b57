"""One restore: manifest → container → planner → executor → providers, on all ranks together or on none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from datastates._base import gc_pause
from datastates._base.columns import U64
from datastates.commit.claims import key_hash
from datastates.container.digests import contributions
from datastates.errors import CorruptError, RestoreError
from datastates.executor.executor import Executor
from datastates.executor.timeline import recorded
from datastates.reading import casting
from datastates.reading.reads import Reads
from datastates.reading.stored import Stored
from datastates.reading.tensors import Tensors
from datastates.restoring.compared import Compared
from datastates.restoring.handing import Late, RestoredObject, naming
from datastates.restoring.meeting import Fit, Meeting, RestoredPart
from datastates.restoring.named_arrays import NamedArrays
from datastates.restoring.renaming import LiveKeys
from datastates.restoring.request import RestoreRequest
from datastates.restoring.restored import Comparison, Restored, misfit, shortened, warn_of_rest, warn_of_unverified
from datastates.restoring.saved_state import SavedState
from datastates.restoring.selection import Cut, Selection
from datastates.state import dtensors
from datastates.state.memory import note_rewritten
from datastates.state.provider import StateProvider, stored_name, walk_unique
from datastates.state.shards import Shard, full_key, objects_of

_NOTHING = Cut(Selection(()), "")
"""Stands for the cut of a provider with no selected key."""


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """A provider that is restored, its saved arrays and objects, and its destinations."""

    provider: StateProvider
    saved: Compared
    shards: Sequence[Shard]


class Restore:
    """One restore of a checkpoint into live state, in place, by all ranks together. Use it once, on one thread.

    Everything is compared on all ranks before anything is changed.
    """

    def __init__(
        self,
        stored: Tensors,
        providers: Sequence[StateProvider],
        executor: Callable[[int], Executor],
        meeting: Meeting,
        request: RestoreRequest,
    ) -> None:
        """Prepare a restore; nothing is read yet.

        Args:
            stored: The checkpoint. If it is of another format, arrays are restored by their names alone.
            providers: The live state to restore into.
            executor: Returns the executor to use, given the number of bytes that will be read.
            meeting: The meeting of the ranks.
            request: The options of the restore. Its step is not looked at.
        """
        self._stored = stored
        self._own = stored if isinstance(stored, Stored) else None  # a checkpoint of this package
        self._providers = providers
        self._make_executor = executor
        self._meeting = meeting
        self._request = request
        self._selection = None if request.keys is None else Selection(request.keys)
        self._live_keys: LiveKeys | None = None  # if keys are renamed
        self._ranks = 1 if self._own is None else self._own.head.ranks  # number of ranks that saved
        self._alone = self._ranks == meeting.ranks == 1
        self._reads = Reads()
        self._taken: list[_Taken] = []
        self._objects: list[RestoredObject] = []
        self._absent: list[str] = []  # keys of providers that the checkpoint lacks
        self._not_here: list[str] = []  # keys of per-rank state that the checkpoint has for other ranks only
        self._result = Restored(stored.step or 0, stored.path.face)

    @gc_pause.paused()
    def run(self) -> Restored:
        """Do the restore; raises as :meth:`datastates.Checkpointer.restore` does."""
        spent = partial(recorded, self._result.spans)
        with contextlib.closing(self._reads):
            with spent("compare"):
                fits = self._meeting.compare(self._look_and_compare, self._strangers)
            self._take_note(fits.unexpected, fits.in_vain)
            with spent("wait"):
                doubtful = set(self._meeting.finish(self._read))
            with spent("digest"):
                unverified = self._compare_digests(doubtful, every=self._request.verify == "digest")
            self._result.unverified_keys = sorted(map(self._live, unverified))
            if self._own is not None:  # other formats may have no checksums at all
                warn_of_unverified([self._live(key) for key in unverified if key in doubtful])
            with spent("objects"):
                self._meeting.together("objects", self._hand_over)
            self._result.spans += self._reads.timeline()
        return self._result

    @gc_pause.paused()
    def compare(self) -> Comparison:
        """Find out the outcome of :meth:`run` without changing anything. Use it instead of :meth:`run`.

        With ``strict`` it raises RestoreError if something does not fit.
        """
        fits = self._meeting.compare(self._look_and_compare, self._strangers)
        self._result.unexpected_keys += fits.unexpected
        self._result.missing_keys += self._not_here
        self._note_parts()
        restored = [full_key(t.saved.name, shard.key) for t in self._taken for shard in t.saved.restored]
        objects = [full_key(o.saved.name, o.shard.key) for o in self._objects]
        found = self._result
        return Comparison(
            found.path,
            found.step,
            tuple(dict.fromkeys([*restored, *objects])),  # a key of several parts occurs several times
            found.cast_keys,
            tuple(found.missing_keys),
            tuple(found.unexpected_keys),
            found.mismatched_keys,
            tuple(found.left_out_keys),
            self._reads.nbytes,
        )

    # --- looking: what the checkpoint has for each provider

    def _look(self) -> None:
        if self._own is None or self._request.rename:
            named = [] if self._own else [p.name for p in walk_unique(self._providers) if p.takes_parts]
            self._live_keys = LiveKeys(self._stored.keys, self._request.rename, named)
        rank, ranks = self._meeting.rank, self._ranks
        for provider in walk_unique(self._providers):
            if self._live_keys is not None and (self._own is None or self._live_keys.concerns(provider.name)):
                self._take_by_name(provider, self._live_keys)
                continue
            assert self._own is not None
            # the state belongs to a rank that did not exist when the checkpoint was saved
            is_new = provider.per_rank and rank >= ranks
            name = stored_name(provider, rank, ranks)
            base = None if is_new else self._own.base(name, rank)
            cut = self._cut(provider, base is None)
            if cut is _NOTHING:
                self._result.left_out_keys.append(full_key(provider.name, ""))
                continue
            if base is None:
                (self._not_here if is_new else self._absent).append(full_key(provider.name, ""))
                continue
            saved = SavedState(self._own, base, name, self._request, cut)
            saved.note_lost_objects(rank)
            shards = saved.select(provider.destinations(saved))
            self._taken.append(_Taken(provider, saved, shards))

    def _take_by_name(self, provider: StateProvider, live: LiveKeys) -> None:
        cut = self._cut(provider, not provider.takes_parts)
        if cut is _NOTHING:
            self._result.left_out_keys.append(full_key(provider.name, ""))
            return
        if not provider.takes_parts:
            if self._own is not None:
                raise RestoreError(f"rename: {provider.name!r} can be restored only as a whole, under its own keys")
            self._absent.append(provider.name)  # other formats hold named arrays only
            return
        named = NamedArrays(self._stored, provider, live, self._request, cut)
        self._taken.append(_Taken(provider, named, named.select(named.destinations())))

    def _cut(self, provider: StateProvider, is_absent: bool) -> Cut | None:
        """The selected part of a provider: None for all of it, :data:`_NOTHING` for none of it.

        Raises:
            RestoreError: A part is selected of a provider that is restored as a whole only.
        """
        selection, name = self._selection, full_key(provider.name, "")
        if selection is None or selection.covers(name):
            return None
        if provider.takes_parts and not is_absent:
            return Cut(selection, name)
        if selection.names(name) and not is_absent:
            raise RestoreError(
                f"keys: {name!r} can be restored only as a whole: select it with '{name}/*', or leave it out"
            )
        return None if selection.names(name) else _NOTHING

    # --- comparing: whether it fits

    def _look_and_compare(self) -> Fit:
        self._look()
        for taken in self._taken:
            targets = taken.saved.plan(taken.shards, self._reads)
            for shard in objects_of(taken.shards):
                assert isinstance(taken.saved, SavedState)
                taken.saved.vet(shard.key)  # refuses an untrusted or damaged object before any change
                self._objects.append(RestoredObject(taken.provider, taken.saved, shard, targets))
        saved, result = [taken.saved for taken in self._taken], self._result
        result.missing_keys = [*self._absent, *(key for s in saved for key in (*s.missing, *s.lost))]
        # with several ranks, another rank may want a key that this rank does not want
        result.unexpected_keys = [key for s in saved for key in s.unexpected] if self._alone else []
        result.mismatched_keys = {key: what for s in saved for key, what in s.mismatched.items()}
        if self._request.strict and (result.missing_keys or result.unexpected_keys or result.mismatched_keys):
            raise misfit(self._stored, result, self._lost())
        casts = [cast for s in saved for cast in s.casts]
        every = (shard for s in saved for shard in s.restored)
        if (keys := self._reads.conflict() or casting.conflict(casts, every)) is not None:
            raise RestoreError(
                f"{self._stored.path} does not fit the live state: {keys} shares live memory with a tensor that "
                "was saved apart from it. Give each memory of its own, as by untying the weights, or leave one out "
                "by keys=",
                mismatched=[keys],
            )
        fits = [s.takes_something for s in saved]
        is_vain = not any(fits) if self._absent or any(fit is not None for fit in fits) else None
        wanted = () if self._alone else (number for s in saved for number in s.wanted())
        unmatched = () if self._selection is None else self._selection.unmatched
        names = [s.name for s in saved if isinstance(s, SavedState)]
        return Fit(np.fromiter(wanted, np.uint64), names, is_vain, unmatched)

    def _strangers(self, wanted: U64, names: set[str]) -> list[str]:
        if self._alone:
            return []
        found = [] if self._own is None else self._own.strangers(wanted, names)
        if self._live_keys is not None:
            taken, stored = set(wanted.tolist()), self._live_keys.stored
            named = [t.saved.name for t in self._taken if isinstance(t.saved, NamedArrays)]
            ours = (full_key(name, key) for name in named for key in self._live_keys.of_provider(name))
            found += [key for key in ours if key_hash(stored[key]) not in taken]
        return found if self._selection is None else [key for key in found if self._selection.takes(key)]

    def _take_note(self, unexpected: list[str], in_vain: bool) -> None:
        """Raise an error, or log, about keys that do not fit, now that they are known for all ranks."""
        result = self._result
        result.unexpected_keys += unexpected
        if in_vain or (self._request.strict and result.unexpected_keys):
            raise misfit(self._stored, result, self._lost())
        if not self._request.strict:
            warn_of_rest(self._stored, result, self._lost())
        result.missing_keys += self._not_here

    def _lost(self) -> dict[str, str]:
        lost = {key: what for taken in self._taken for key, what in taken.saved.lost.items()}
        return {**lost, self._absent[0]: self._in_its_place()} if self._absent else lost

    def _in_its_place(self) -> str:
        """The advice about a provider that the checkpoint lacks: the providers that it has, and the remedy."""
        name, rest = self._absent[0], "strict=False restores the rest"
        if self._own is None:
            return f"it is no checkpoint of datastates, and holds arrays only; {rest}"
        has = self._own.providers()
        asked = {taken.saved.name for taken in self._taken}
        by_name = any(p.takes_parts for p in self._providers if full_key(p.name, "") == name)
        others = [other for other in has if other not in asked] if by_name else []
        old = others[0] if len(others) == 1 else "OLD"
        rename = f"restore(rename={{'{old}/': '{name}/'}}) finds arrays under another name, " if others else ""
        return f"it has {shortened(list(map(repr, has))) or 'nothing'}; {rename}{rest}"

    # --- reading, and what comes after it

    def _read(self) -> list[str]:
        """Read everything, and fill objects meanwhile; returns the keys that were read without checksums."""
        casts = [cast for taken in self._taken for cast in taken.saved.casts]
        most = max(self._reads.nbytes, casting.WINDOW if casts else 0)
        try:
            executor = self._make_executor(most)
            self._reads.start(executor)
        finally:  # even after an error, as some reads may have begun
            for taken in self._taken:  # while bytes are read
                note_rewritten(taken.saved.rewritten)
        try:
            for restored in self._objects:
                restored.fill()
        finally:
            tally = self._reads.finish()
        tally += casting.run(casts, executor)
        for name in ("needed_nbytes", "read_nbytes", "shared_nbytes"):
            setattr(self._result, name, getattr(tally, name))
        for path, nbytes in self._reads.by_file().items():
            place = str(self._stored.path) if self._own is None else self._own.origin(path)
            self._result.source[place] = self._result.source.get(place, 0) + nbytes
        return list(tally.unverified_keys)

    def _compare_digests(self, doubtful: set[str], *, every: bool) -> list[str]:
        """Compare the digests of restored tensors with the saved digests.

        Args:
            doubtful: Full keys, in the checkpoint, of tensors that were read without checksums.
            every: Whether to compare all tensors, not only the doubtful ones.

        Returns:
            Full keys, in the checkpoint, of the tensors that cannot be compared.

        Raises:
            CorruptError: Restored contents differ from the saved ones. All ranks raise the same error.
        """
        if not every and not doubtful:
            return []
        keys = None if every else doubtful
        wrong, unknown = self._meeting.digest(
            lambda: [held for taken in self._taken for held in _held(taken.saved, keys)], self._stored.digest, doubtful
        )
        wrong = list(map(self._live, wrong))
        if wrong:
            path = str(self._stored.path)
            shown = shortened(list(map(repr, wrong)))
            raise CorruptError(f"{shown} from {path}: the contents do not match the digest", key=wrong[0], path=path)
        return unknown

    def _live(self, key: str) -> str:
        """The full key in the live state of an array with the full key ``key`` in the checkpoint."""
        return key if self._live_keys is None else self._live_keys.live.get(key, key)

    def _hand_over(self) -> None:
        late = Late(self._stored, [taken.saved for taken in self._taken], self._result)
        for restored in self._objects:
            restored.hand_over(self._stored.path)
        for taken in self._taken:
            with naming(full_key(taken.saved.name, ""), self._stored.path):
                taken.saved.hand_over()
        late.note(strict=self._request.strict)
        self._note_parts()

    def _note_parts(self) -> None:
        """Note in the result the keys that are left out, and the keys that are cast."""
        for saved in (taken.saved for taken in self._taken):
            left_out = () if saved.cut is None else saved.cut.left_out
            self._result.left_out_keys += [full_key(saved.name, key) for key in left_out]
            self._result.cast_keys |= {full_key(saved.name, cast.shard.key): cast.types for cast in saved.casts}


def _held(saved: Compared, keys: set[str] | None) -> Iterator[RestoredPart]:
    converted = {cast.shard.key for cast in saved.casts}  # a digest depends on the element type
    named = ((shard, saved.stored_key(shard.key)) for shard in saved.restored if shard.key not in converted)
    held = [(shard, full) for shard, full in named if (keys is None or full in keys) and shard.part.numel]
    found = contributions([replace(shard, source=dtensors.local(shard.source)) for shard, _ in held])
    for (shard, full), number in zip(held, found, strict=True):
        yield RestoredPart(full, str(shard.part), shard.part.numel, math.prod(shard.global_shape), number)
