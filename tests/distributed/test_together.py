"""A restore ends alike on all ranks: a failure of one rank, after all have read, is told to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_state import SMALL, Rank, save

import datastates as ds
from datastates.errors import CommitError, RestoreError
from datastates.providers import PickledObjectProvider
from datastates.restoring.restored import Restored
from datastates.state.shards import Shard


class Refusing(PickledObjectProvider):
    """A provider that cannot restore its object."""

    def restore(self, shard: Shard, value: object) -> None:
        raise LookupError("no room")


def test_an_object_that_one_rank_cannot_take_back_fails_on_all(threads: Any, tmp_path: Path) -> None:
    save(threads, tmp_path / "step-00000003", "rows", 3)

    def one(rank: int) -> tuple[Exception | Restored | None, Restored | None]:
        state = Rank("rows", rank, 3)
        loop = Refusing("loop", lambda: None, lambda _: None) if rank == 1 else state.providers[1]
        with ds.Checkpointer(tmp_path, **SMALL) as ckpt:
            first: Exception | Restored | None = None
            try:
                first = ckpt.restore([state.model, loop, state.providers[2]])
            except (LookupError, ds.DatastatesError) as error:
                first = error
            # the ranks go on together
            return first, ckpt.restore(state.providers)

    outcomes = threads(3, one)
    assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    (first, _), (own, _), (other, _) = outcomes
    assert isinstance(own, ds.errors.ProviderError)
    assert isinstance(own.__cause__, LookupError)
    for error in (first, other):
        assert isinstance(error, CommitError), error
        assert not isinstance(error, RestoreError)
        assert str(error) == f"rank 1: {own}"
    assert [restored.step for _, restored in outcomes] == [3] * 3
