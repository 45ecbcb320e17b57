"""The tests that every tier must pass; subclass them in a file that pytest collects."""

from __future__ import annotations

import pytest

from datastates.commit import health, manifest, newest, retention, run
from datastates.commit.manifest import ContainerEntry, Manifest, container_name
from datastates.commit.names import step_name
from datastates.commit.tier import Tier, Uncommitted
from datastates.commit.tiers import tier_of
from datastates.errors import CheckpointNotFoundError
from datastates.kept import Keep
from datastates.storage import Location, Store, store_of

_DATA = b"state"
_ATTEMPT = "01234567"


class TierTests:
    """Tests of what a tier promises.

    Write ``class TestMine(TierTests)`` and define :meth:`make`.
    """

    def make(self) -> Tier:
        """Return a tier without checkpoints, in a place that exists, for one test."""
        raise NotImplementedError

    def age(self) -> None:
        """Let more than a day pass for all that lies in the place, if the tier cannot tell sooner who is dead."""

    @pytest.fixture(autouse=True)
    def _made(self) -> None:
        self.tier = self.make()

    def begin(self, step: int, attempt: str | None = None) -> Uncommitted:
        """A checkpoint that is under way."""
        return self.tier.pending(self.target(step), attempt, b"").begin()

    def write(self, begun: Uncommitted, rank: int = 0) -> Uncommitted:
        """Write the container of a rank into a checkpoint that is under way; returns the checkpoint."""
        store_of(begun.target).create(begun.file(container_name(rank)), _DATA)
        return begun

    def container(self, begun: Uncommitted, rank: int = 0) -> Location:
        """The path of the container of a rank: in a store of objects it has the name of the attempt."""
        plain = begun.path(container_name(rank))
        named = begun.path(container_name(rank, begun.attempt))
        return named if store_of(named).exists(named) else plain

    def manifest(self, begun: Uncommitted, step: int) -> Manifest:
        """The manifest of a checkpoint of one rank."""
        return Manifest(
            format=manifest.FORMAT_VERSION,
            step=step,
            sequence=run.next_sequence(self.tier),
            attempt=begun.attempt,
            created=manifest.now(),
            world_size=1,
            containers=(ContainerEntry(file=self.container(begun).name, rank=0, nbytes=len(_DATA), index_crc32=0),),
        )

    def target(self, step: int) -> Location:
        """The path of the first checkpoint of a step."""
        return self.tier.root / step_name(step)

    def commit(self, step: int, metric: float | None = None) -> Location:
        """Save a checkpoint; returns its path."""
        begun = self.write(self.begin(step))
        return begun.commit(self.manifest(begun, step).model_copy(update={"metric": metric}))

    def test_a_checkpoint_appears_at_its_commit(self) -> None:
        """Nobody sees a checkpoint before ``commit`` returns, and then all of it."""
        begun = self.write(self.begin(1))
        assert self.tier.checkpoints() == []
        path = begun.commit(self.manifest(begun, 1))
        (found,) = self.tier.checkpoints()
        assert (found.step, found.attempt, found.path) == (1, begun.attempt, path)
        assert manifest.open(path).step == 1
        assert health.problem(path) is None
        assert self.tier.debris() == []

    def test_a_manifest_that_is_garbled_on_its_way_is_read_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A bit that flips in one read makes a checkpoint unreadable for one list, not for the process's life."""
        paths = [self.commit(step) for step in (2, 1)]
        tier, store = tier_of(self.tier.root), store_of(self.tier.root)
        real, garbled = store.read_all, list[Location]()

        def flip(_: Store, path: Location, most: int | None = None) -> bytes:
            data = real(path, most)
            if path.parent != paths[1] or garbled:
                return data
            garbled.append(path)
            return bytes([data[0] ^ 1]) + data[1:]

        monkeypatch.setattr(type(store), "read_all", flip)
        assert [one.sequence for one in tier.checkpoints()] == [None, 1]
        assert [one.sequence for one in tier.checkpoints()] == [2, 1]
        assert newest.find(newest.Given(tier_of(self.tier.root))) == paths[1]

    def test_a_step_that_is_saved_again_is_another_checkpoint(self) -> None:
        """Each has an identity; the one that was committed last is the newest."""
        paths = [self.commit(step) for step in (2, 1, 2)]
        every = self.tier.checkpoints()
        assert len({(one.step, one.attempt) for one in every}) == len({one.path for one in every}) == 3
        assert [one.path for one in newest.in_order(every)] == paths
        retention.retain(self.tier, Keep(last=1))
        assert [one.path for one in self.tier.checkpoints()] == paths[2:]

    def test_the_best_stay(self) -> None:
        """Lists have the metrics, whoever made the checkpoints, and retention goes by them."""
        paths = [self.commit(step, metric) for step, metric in enumerate([0.5, None, 0.25, 0.75])]
        for tier in (tier_of(self.tier.root), self.tier):
            assert [one.metric for one in tier.checkpoints(known=True)] == [0.5, None, 0.25, 0.75]
        retention.retain(tier_of(self.tier.root), Keep(best=1))
        assert [one.path for one in self.tier.checkpoints()] == paths[2:]

    def test_what_is_read_is_not_deleted(self) -> None:
        """``remove`` deletes nothing while ``protect`` holds; later nothing is left."""
        path = self.commit(1)
        with self.tier.protect(path):
            assert not self.tier.remove(path)
            assert health.problem(path) is None
        assert self.tier.remove(path)
        assert self.tier.checkpoints() == self.tier.debris() == []
        assert store_of(path).entries(path, deep=True) == {}
        with pytest.raises(CheckpointNotFoundError), self.tier.protect(path):
            pass
        assert self.tier.remove(path), "it is no error that it is gone"

    def test_what_was_given_up_leaves_nothing(self) -> None:
        """``abandon`` removes all files of a checkpoint, and its step can be saved again."""
        self.write(self.begin(1)).abandon()
        assert self.tier.checkpoints() == self.tier.debris() == []
        assert store_of(self.tier.root).entries(self.tier.root, deep=True) == {}
        assert manifest.open(self.commit(1)).step == 1

    def test_only_what_nobody_writes_is_debris(self) -> None:
        """``sweep`` deletes what a dead writer left, and nothing of a living one."""
        dead = self.write(self.begin(1))
        dead.close()
        self.age()
        alive = self.write(self.begin(2))
        assert len(self.tier.debris()) == 1
        self.tier.sweep()
        assert self.tier.debris() == []
        path = alive.commit(self.manifest(alive, 2))
        assert [one.path for one in self.tier.checkpoints()] == [path]

    def test_ranks_write_one_checkpoint(self) -> None:
        """All ranks of an attempt write into one checkpoint, which one of them commits."""
        target = self.target(1)
        ranks = [self.write(self.tier.pending(target, _ATTEMPT, b"").begin(), number) for number in range(2)]
        for rank in ranks:
            rank.seal()
        assert len({self.container(rank, 1) for rank in ranks}) == 1
        ranks[1].leave()
        ranks[1].abandon()  # it does not know yet that rank 0 commits
        path = ranks[0].commit(self.manifest(ranks[0], 1))
        assert {self.container(ranks[0], number).name for number in range(2)} <= {*store_of(path).names(path)}
        assert self.tier.of_attempt(target, _ATTEMPT) == path
        assert self.tier.of_attempt(target, "76543210") is None

    def test_a_rank_that_gives_up_removes_its_files_alone(self) -> None:
        """The files of other ranks stay until these give up, too."""
        target = self.target(1)
        ranks = [self.write(self.tier.pending(target, _ATTEMPT, b"").begin(), number) for number in range(2)]
        ranks[1].abandon()
        store = store_of(self.tier.root)
        assert [store.exists(self.container(ranks[0], number)) for number in range(2)] == [True, False]
        ranks[0].abandon()
        # a manifest's place may say that no checkpoint will be there
        assert all(name.endswith(manifest.FILE) for name in store.entries(self.tier.root, deep=True))
        assert self.tier.checkpoints() == self.tier.debris() == []
