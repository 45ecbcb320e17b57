"""Ranks commit one checkpoint in a store of objects: they hear one answer, and the store is asked little."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from object_place import DROPPED, MADE, ROOT, SHORT, Answers, there
from voting import together

from datastates.commit import manifest
from datastates.commit.ballot import Ballot
from datastates.commit.claims import Claims
from datastates.commit.manifest import ContainerEntry, Manifest, container_name
from datastates.commit.object_tier import ObjectTier
from datastates.commit.run import Run
from datastates.commit.votes import File, Vote
from datastates.errors import UncertainError
from datastates.kept import Keep
from datastates.ranks.world import World, world_of
from datastates.storage import Entry, Location, register

PAGE = 1000
FIRST = 10_000


class Counting(Answers):
    """Counts requests as a bucket's: a page of a list has 1,000 names, and each object is removed alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def look(self, path: Location) -> Entry | None:
        self.requests.append("look")
        return super().look(path)

    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        found = super().entries(folder, deep=deep)
        self.requests += ["list"] * max(1, math.ceil(len(found) / PAGE))
        return found

    def lengths(self, paths: Sequence[Location]) -> list[int | None]:
        found = self.entries(paths[0].parent)
        return [found[path.name].nbytes if path.name in found else None for path in paths]

    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        self.requests.append("read")
        return super().read(path, offset, nbytes)

    def create(self, path: Location, data: bytes) -> None:
        self.requests.append("create")
        super().create(path, data)

    def discard(self, paths: Sequence[Location]) -> None:
        self.requests += ["remove"] * len(paths)
        super().discard(paths)


@pytest.fixture
def counting(store: Answers) -> Counting:
    register("mem", made := Counting())
    return made


class Job:
    """The ranks of a job that saves, as threads."""

    def __init__(self, worlds: Sequence[World], keep: Keep) -> None:
        tier = ObjectTier(ROOT, SHORT)
        told = tier.begin_opening()
        self.tier = tier
        self.worlds = worlds
        self.runs = [Run(tier, tier.opening(told), keep, is_coordinator=world.rank == 0) for world in worlds]
        self.number = 0

    def begin(self) -> list[Ballot]:
        """A checkpoint of all ranks: their containers are written."""
        number, self.number = self.number, self.number + 1
        together(*(run.begin for run in self.runs))
        ballots = [
            Ballot(world, f"save/{number}", run, step=FIRST + number, number=number)
            for world, run in zip(self.worlds, self.runs, strict=True)
        ]
        for ballot in ballots:
            ballot.open(0)
        return ballots

    def vote(self, ballots: Sequence[Ballot]) -> list[Location | Exception]:
        nothing = Claims(
            *(np.zeros(0, kind) for kind in (np.uint64, np.uint32, np.uint64, np.uint64, np.uint32, np.uint8)), 0
        )
        alone = len(ballots) == 1
        votes = [Vote(b.step, files=(File(b.path.name, 5, 0, None if alone else nothing),)) for b in ballots]
        return together(*(lambda b=b, v=v: b.commit(v) for b, v in zip(ballots, votes, strict=True)))


@pytest.fixture(params=[1, 3])
def worlds(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[World]]:
    size = request.param
    made = together(*(lambda rank=rank: world_of(rank, size, tmp_path, 60) for rank in range(size)))
    yield made
    together(*(world.close for world in made))


def kept_before(store: Answers, count: int, ranks: int) -> None:
    """Checkpoints of an earlier run, the oldest first."""
    for number in range(count):
        attempt = f"{number:08x}"
        path = ROOT / f"step-{number:08d}.{attempt}"
        entries = tuple(
            ContainerEntry(file=container_name(rank, attempt), rank=rank, nbytes=5, index_crc32=0)
            for rank in range(ranks)
        )
        catalog = manifest.CatalogEntry(file=f"catalog.{attempt}.bin", nbytes=5, head_crc32=0)
        fields = {
            "format": 2,
            "step": number,
            "sequence": number + 1,
            "attempt": attempt,
            "created": "",
            "world_size": ranks,
        }
        made = Manifest(**fields, containers=entries, catalog=catalog if ranks > 1 else None)
        for file, _ in manifest.files_of(path, made):
            store.replace(file, b"state")
        store.replace(path / manifest.FILE, manifest.encode(made))


@pytest.mark.long
@pytest.mark.parametrize("kept", [3, 1000])
def test_a_commit_takes_few_requests_however_many_are_kept(kept: int, worlds: list[World], counting: Counting) -> None:
    """Parts + 4 a rank, of which two begin and complete an upload, and 4 for all. A deletion comes on top."""
    ranks = len(worlds)
    kept_before(counting, kept, ranks)
    job = Job(worlds, Keep(last=kept + 1))
    pages = math.ceil((kept + 4) / PAGE)
    counts = []
    for _ in range(4):
        counting.requests.clear()
        ballots = job.begin()
        begun = len(counting.requests)
        for ballot in ballots:
            counting.replace(ballot.path, b"state")
        paths = job.vote(ballots)
        assert len({*paths}) == 1
        counts.append((begun, sorted(counting.requests[begun:])))
    (_, first), _, *last = counts  # the second one finds out which of those that are kept are whole
    wanted = ["create"] * (1 if ranks == 1 else 2) + ["list"] * (pages + (ranks > 1))
    assert first == wanted  # one more is kept
    assert len(wanted) <= 2 * ranks + 4
    deletion = ["create"] + ["list"] * (pages + 1) + ["remove"] * (1 if ranks == 1 else ranks + 1) + ["remove"]
    assert last == [(0, sorted(wanted + deletion))] * 2
    assert len(job.tier.checkpoints()) == kept + 1


def test_all_ranks_are_told_that_the_outcome_is_uncertain(worlds: list[World], store: Answers) -> None:
    job = Job(worlds, Keep())
    ballots = job.begin()
    for ballot in ballots:
        store.replace(ballot.path, b"state")
    store.said = [DROPPED]
    told = job.vote(ballots)
    assert [type(one) for one in told] == [UncertainError] * len(worlds)
    assert len({str(one) for one in told}) == 1
    assert "may be committed, now or later, or not" in str(told[0])
    for ballot in ballots:
        ballot.abandon(made=True)
    assert sum("rank" in name for name in there(store)) == len(worlds)
    store.said = [MADE]
    ballots = job.begin()
    for ballot in ballots:
        store.replace(ballot.path, b"state")
    assert len({*job.vote(ballots)}) == 1
    assert [one.step for one in job.tier.checkpoints()] == [FIRST + 1]
