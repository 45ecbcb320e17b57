"""Which rank writes what: agreed on by all ranks through torch's Store, and remembered while nothing changes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from datastates.ranks.together import settle
from datastates.ranks.world import World

_SAME, _NEW = b"=", b"+"


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """What came out for the plans that have these digests.

    Attributes:
        local: What this rank had planned by itself.
        digest: That of this rank's.
        digests: Those of all ranks', on the coordinator.
        plan: What this rank writes.
        metadata: What all of them make, on the coordinator.
        items: How many items that are, of all ranks, on the coordinator.
    """

    local: SavePlan
    digest: bytes
    digests: dict[int, bytes]
    plan: SavePlan
    metadata: Metadata | None
    items: int


class Planning:
    """The plans of one rank for one save after the other. Used by one thread at a time."""

    def __init__(self, world: World, timeout: float) -> None:
        """Agree in that world; ``timeout`` in seconds for each wait."""
        self._world = world
        self._timeout = timeout
        self._last: Agreed | None = None

    def agree(
        self,
        name: str,
        planner: SavePlanner,
        prepare: Callable[[], SavePlan],
        distribute: Callable[[list[SavePlan]], list[SavePlan]],
    ) -> Agreed:
        """Plan a save with all ranks, which call this together.

        One exchange of digests where no rank's plan has changed; otherwise a second one of the plans.

        Args:
            name: What all ranks call this save, and no other.
            planner: Makes the global plan, on the coordinator.
            prepare: Gives this rank's plan, the same object where nothing has changed; what it raises is told to all.
            distribute: What the storage writer makes of the plans of all, on the coordinator.

        Raises:
            CommitError: Planning failed on another rank; its own error is raised on a rank where it failed.
        """
        error: BaseException | None = None
        local = SavePlan([])
        try:
            local = prepare()
            if getattr(planner, "_enable_plan_caching", not local.usable):
                raise ValueError("planner: it caches plans itself; plans are remembered here, give one that does not")
        except Exception as failure:  # the others are not to wait for this rank
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
        answer = settle(self._world, f"{name}/digests", error, said, compare, timeout=self._timeout)
        if answer == _SAME:
            assert last is not None
            self._last = replace(last, local=local)
            return self._last
        self._last = None  # whoever does not hear what comes out now must not go by what came out before
        made: list[tuple[Metadata, int]] = []
        asked = [planner]  # emptied below: an error's frames keep what closures hold

        def plan(plans: dict[int, bytes]) -> bytes:
            every, metadata = asked[0].create_global_plan([pickle.loads(plans[rank]) for rank in sorted(plans)])
            made.append((metadata, sum(len(each.items) for each in every)))
            return pickle.dumps(distribute(every))

        try:
            answer = settle(self._world, f"{name}/plans", None, pickle.dumps(local), plan, timeout=self._timeout)
        finally:
            asked.clear()
        own: SavePlan = pickle.loads(answer)[self._world.rank]
        self._last = Agreed(local, digest, told, own, *(made[0] if made else (None, 0)))
        return self._last

    def decline(self, name: str, error: BaseException) -> None:
        """Tell all ranks that this one takes no part; raises ``error``."""
        settle(self._world, f"{name}/digests", error, b"", lambda _: b"", timeout=self._timeout)


def _digest(plan: SavePlan) -> bytes:
    return hashlib.blake2b(pickle.dumps(plan), digest_size=16).digest()
