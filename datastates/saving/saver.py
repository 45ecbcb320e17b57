"""Prepares one snapshot on its way: providers → planner → executor → file → commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from datastates._base import gc_pause
from datastates.commit.ending import Ending
from datastates.executor.executor import Executor
from datastates.saving.bases import Bases
from datastates.saving.collect import Collected, collect
from datastates.saving.frame import Framing
from datastates.saving.incremental import IncrementalRunning, is_possible
from datastates.saving.running import ArrayWitness, Running, SavePlan, _serialize
from datastates.saving.snapshot import Snapshot
from datastates.saving.structure import Structure
from datastates.state.known_layout import Knowledge
from datastates.state.provider import StateProvider


class Saver:
    """Prepares snapshots with one executor, and keeps the plan of the last one for the next. Not thread-safe."""

    def __init__(
        self, executor: Executor, framing: Framing, rank: int = 0, ranks: int = 1, bases: Bases | None = None
    ) -> None:
        """Prepare for the files of one rank.

        Args:
            executor: Writes the files.
            framing: The format of the files.
            rank: The number of this rank.
            ranks: The number of ranks that save together.
            bases: What saves are compared with, so that only what differs is written; None: all is written.
        """
        self._executor = executor
        self._framing = framing
        self._rank = rank
        self._ranks = ranks
        self._bases = bases
        self._last: SavePlan | None = None
        self._knowledge = Knowledge()

    def collect(self, providers: Sequence[StateProvider]) -> Collected:
        """Call :func:`~datastates.saving.collect.collect` with the structure and the knowledge of the last snapshot."""
        last = self._last.structure if self._last else None
        return collect(providers, last, self._knowledge, rank=self._rank, ranks=self._ranks)

    def prepare(self, collected: Collected, snapshot: Snapshot, ending: Ending) -> Running:
        """Serialize objects that are not lazy, and plan the file; returns the snapshot's work, which has not begun.

        Args:
            collected: The state, as the providers described it.
            snapshot: The snapshot, which the work lets go on.
            ending: Where to write the file, and how to commit it.
        """
        objects = [(p, s, None if s.lazy else _serialize(collected, p, s)) for p, s in collected.objects]
        planned = self._planned(collected.structure)
        parts = self._executor, collected, snapshot, planned, objects, ArrayWitness(collected), ending
        if (
            self._bases is None
            or not self._bases.needs_hashes
            or not is_possible(collected.structure, self._executor.cache)
        ):
            return Running(*parts)
        return IncrementalRunning(*parts, bases=self._bases)

    @gc_pause.paused()
    def _planned(self, structure: Structure) -> SavePlan:
        last, self._last = self._last, None
        if last is None or last.structure is not structure:
            key = structure.plan_key()
            if last is None or last.key != key:
                last = SavePlan(structure, key, *self._framing.plan(structure, self._executor.block))
            last = replace(last, structure=None if structure.holds_state else structure)
        self._last = last
        return last
