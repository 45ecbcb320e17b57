"""The global plan of a save. All ranks agree on it through torch's Store, and keep it while nothing changes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from datastates.ranks.world import World, settle

_SAME, _NEW = b"=", b"+"


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """The global plan for a set of local plans.

    Attributes:
        local: This rank's local plan.
        digest: The digest of the local plan.
        digests: On the coordinator: the digests of all ranks' local plans, by rank.
        plan: The plan of the items that this rank writes.
        metadata: On the coordinator: the checkpoint's metadata.
        items: On the coordinator: the number of items that all ranks write.
    """

    local: SavePlan
    digest: bytes
    digests: dict[int, bytes]
    plan: SavePlan
    metadata: Metadata | None
    items: int


class Planning:
    """Plans one save after another with the other ranks. Used by one thread at a time."""

    def __init__(self, world: World) -> None:
        """Plan with the ranks of ``world``."""
        self._world = world
        self._last: Agreed | None = None

    def agree(
        self,
        name: str,
        planner: SavePlanner,
        prepare: Callable[[], SavePlan],
        distribute: Callable[[list[SavePlan]], list[SavePlan]],
    ) -> Agreed:
        """Plan a save with all ranks, which call this together.

        The ranks exchange digests of their plans. Only if a plan has changed do they exchange the plans, too.

        Args:
            name: A name that all ranks give to this save and to no other.
            planner: Makes the global plan, on the coordinator.
            prepare: Returns this rank's local plan, the same object if nothing has changed. All ranks hear its error.
            distribute: The storage writer's changes to the plans of all ranks, on the coordinator.

        Raises:
            CommitError: Planning failed on another rank. A rank on which it failed raises its own error.
        """
        error: BaseException | None = None
        local = SavePlan([])
        try:
            local = prepare()
            if getattr(planner, "_enable_plan_caching", not local.usable):
                raise ValueError("planner: it caches plans itself; async_save does that, so give one that does not")
        except Exception as failure:  # the other ranks must not wait for this one
            error = failure
        last = self._last
        if last is None or last.local is not local:
            digest = _digest(local)
            last = last if last is not None and last.digest == digest else None
        else:
            digest = last.digest
        told: dict[int, bytes] = {}

        def compare(digests: dict[int, bytes]) -> bytes:
            told.update({rank: said[1:] for rank, said in digests.items()})
            known = all(said[:1] == _SAME for said in digests.values())
            return _SAME if known and last is not None and last.digests == told else _NEW

        said = (_NEW if last is None else _SAME) + digest
        answer = settle(self._world, f"{name}/digests", error, said, compare)
        if answer == _SAME:
            assert last is not None
            self._last = replace(last, local=local)
            return self._last
        self._last = None  # a rank that does not hear this outcome must not go by the last one
        made: list[tuple[Metadata, int]] = []
        asked = [planner]  # emptied below: an error's frames would keep the planner alive

        def plan(plans: dict[int, bytes]) -> bytes:
            every, metadata = asked[0].create_global_plan([pickle.loads(plans[rank]) for rank in sorted(plans)])
            made.append((metadata, sum(len(each.items) for each in every)))
            return pickle.dumps(distribute(every))

        try:
            answer = settle(self._world, f"{name}/plans", None, pickle.dumps(local), plan)
        finally:
            asked.clear()
        own: SavePlan = pickle.loads(answer)[self._world.rank]
        self._last = Agreed(local, digest, told, own, *(made[0] if made else (None, 0)))
        return self._last

    def decline(self, name: str, error: BaseException) -> None:
        """Tell all ranks that this one takes no part in a save; raises ``error``."""
        settle(self._world, f"{name}/digests", error, b"", lambda _: b"")


def _digest(plan: SavePlan) -> bytes:
    return hashlib.blake2b(pickle.dumps(plan), digest_size=16).digest()
