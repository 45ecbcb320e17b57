"""A place in a store of objects in memory, whose answers and ages a test decides."""

from __future__ import annotations

import errno

from aged_store import AgedStore

from datastates.commit import manifest, run
from datastates.commit.decision import Patience
from datastates.commit.manifest import ContainerEntry, Manifest, container_name
from datastates.commit.tier import Tier, Uncommitted
from datastates.errors import StorageError, UncertainError
from datastates.storage import Location, store_of

ROOT = Location("mem://bucket/run")
DAY, WEEK = 86_400.0, 7 * 86_400.0
SHORT = Patience(commit=0.02, fence=0.02, pause=0.001, longest=0.001)
MADE, LOST, DROPPED, DENIED = "made", "lost", "dropped", "denied"


class Answers(AgedStore):
    """Answers to creates of manifests as it is told: the last word goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = [MADE]

    def create(self, path: Location, data: bytes) -> None:
        if path.name != manifest.FILE:
            super().create(path, data)
            return
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if said == DENIED:
            raise StorageError(errno.EACCES, "create", str(path))
        if said != DROPPED:
            super().create(path, data)
        if said != MADE:
            raise UncertainError(0, "create", str(path), f"create {path}: the connection was closed")


def write(tier: Tier, step: int = 1, attempt: str | None = None) -> Uncommitted:
    """A checkpoint of one rank, all but committed."""
    begun = tier.pending(tier.root / f"step-{step:08d}", attempt, b"").begin()
    store_of(tier.root).create(begun.file(container_name(0)), b"state")
    return begun


def made(tier: Tier, begun: Uncommitted, step: int = 1) -> Manifest:
    file = container_name(0, begun.attempt)
    return Manifest(
        format=2,
        step=step,
        sequence=run.next_sequence(tier),
        attempt=begun.attempt,
        created=manifest.now(),
        world_size=1,
        containers=(ContainerEntry(file=file, rank=0, nbytes=5, index_crc32=0),),
    )


def commit(tier: Tier, step: int = 1, attempt: str | None = None, *, metric: float | None = None) -> Location:
    begun = write(tier, step, attempt)
    return begun.commit(made(tier, begun, step).model_copy(update={"metric": metric}))


def there(store: AgedStore) -> list[str]:
    return sorted(store.entries(ROOT, deep=True))
