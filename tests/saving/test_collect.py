"""Collecting what providers describe on one of several ranks: who writes shared memory, and what gets a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import datastates as ds
from datastates.container.pickle_writer import dumps
from datastates.errors import ProviderError
from datastates.providers import ReplicatedProvider, from_state_dict
from datastates.saving.collect import collect
from datastates.state.arrays import array_shard
from datastates.state.shards import Buffer, Shard, object_shard


def test_what_shares_memory_is_written_by_one_rank() -> None:
    flat = np.arange(12.0)
    state = {"a": np.ones(5), "embed": flat[:8], "b": np.ones(6), "head": flat[:8], "rest": flat[8:], "c": np.ones(7)}
    provider = ReplicatedProvider(from_state_dict("m", state), ranks=(0, 1))
    written = [
        {structure.key(i): shard.nbytes for i, (_, shard) in enumerate(structure.arrays) if shard.nbytes}
        for structure in (collect([provider], rank=rank, ranks=2).structure for rank in (0, 1))
    ]
    assert sorted(key for keys in written for key in keys) == sorted(f"m/{key}" for key in state)
    shared = {"m/embed", "m/head", "m/rest"}
    assert sorted(len(shared & keys.keys()) for keys in written) == [0, 3]


class _Last(ds.StateProvider):
    """A rank past the last rows of two tensors, as torch shards them: both of its parts are empty, at address 0."""

    def shards(self) -> Sequence[Shard]:
        return [
            Shard(key, "float32", "numpy", (0, 3), (3, 1), (2, 3), (2, 0), buffer=Buffer(0, 0), source=np.ones((0, 3)))
            for key in ("exp_avg", "exp_avg_sq")
        ]


def test_empty_parts_have_records_of_their_own() -> None:
    structure = collect([_Last("optim")], rank=2, ranks=3).structure
    assert structure.source == [0, 1]


class _Both(ds.StateProvider):
    """Arrays and objects under keys of its own choice."""

    def __init__(self, name: str, arrays: Sequence[str], objects: Sequence[str]) -> None:
        super().__init__(name)
        self._arrays, self._objects = arrays, objects

    def shards(self) -> Sequence[Shard]:
        """Each array by itself, then the objects."""
        arrays = [array_shard(key, np.ones(3)) for key in self._arrays]
        return [*arrays, *map(object_shard, self._objects)]

    def serialize(self, shard: Shard) -> bytes:
        """Pickle the key; any value would do."""
        return dumps(shard.key)


@pytest.mark.parametrize(
    ("arrays", "objects", "key"),
    [(["a", "b"], ["b"], "m/b"), (["a"], ["", "rest"], "m/rest"), ([], ["x", "x"], "m/x")],
)
def test_of_two_shards_none_takes_the_others_place(
    tmp_path: Path, arrays: list[str], objects: list[str], key: str
) -> None:
    """Also where the arrays are those of the last snapshot."""
    with ds.Checkpointer(tmp_path) as ckpt:
        ckpt.snapshot([_Both("m", arrays, ["other"])], step=1)
        with pytest.raises(ProviderError, match=key):
            ckpt.snapshot([_Both("m", arrays, objects)], step=2)
