"""Measure one rank restoring what 64 ranks have saved, a file each, next to one file with the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import datastates as ds
import page_cache
import raw
from datastates.state.provider import Saved, StateProvider
from datastates.state.shards import Buffer, Shard
from measure import Plan, Result, Sample, interleave, stopwatch, storage_nbytes

FILES = 64


class Rows(StateProvider):
    """Every tensor's rows from one fraction of it to another."""

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> None:
        """Take the rank's share of the tensors, the sizes of which are multiples of ``ranks``."""
        super().__init__("model")
        self._tensors = tensors
        self._rank = rank
        self._ranks = ranks

    def shards(self) -> Sequence[Shard]:
        return [self._shard(key, tensor) for key, tensor in self._tensors.items()]

    def destinations(self, saved: Saved) -> Sequence[Shard]:
        return self.shards()

    def _shard(self, key: str, tensor: torch.Tensor) -> Shard:
        own = tensor.chunk(self._ranks)[self._rank]
        return Shard(
            key=key,
            dtype="float32",
            kind="torch",
            shape=tuple(own.shape),
            stride=own.stride(),
            global_shape=tuple(tensor.shape),
            offset=(self._rank * len(own), 0),
            lazy=True,
            buffer=Buffer(own.data_ptr(), own.nbytes, owner=own),
            source=own,
        )


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure both, and raw reads of one file of as many bytes with O_DIRECT."""
    rows, tensors = (FILES, 4) if tiny else (40 * FILES, 96)
    saved = {f"layer{i}.weight": torch.rand(rows, 1024) for i in range(tensors)}
    live = {key: torch.empty_like(tensor) for key, tensor in saved.items()}
    file = raw.RawFiles((directory / "raw",), sum(tensor.nbytes for tensor in saved.values()))
    mode = raw.best_mode(file, "read")
    file.run("write", mode)
    result = Result(parameters={"bytes": file.nbytes, "files": FILES}, settings={"raw": raw.in_words(mode)})

    def read_raw() -> Sample:
        page_cache.drop(file.paths[0])
        return file.run("read", mode)

    actions: dict[str, Callable[[], Sample]] = {"raw": read_raw}
    with contextlib.ExitStack() as stack:
        for name, ranks in (("one file", 1), (f"{FILES} files", FILES)):
            folder = directory / str(ranks)
            _save(folder / "step-00000001", saved, ranks)
            checkpointer = stack.enter_context(ds.Checkpointer(folder))
            actions[name] = partial(_restored, checkpointer, saved, live)
        interleave(result, actions, plan)
    file.remove()
    return result


def _save(path: Path, tensors: dict[str, torch.Tensor], ranks: int) -> None:
    """Save the tensors by as many ranks, which are threads here."""

    def one(rank: int) -> None:
        share = [Rows(tensors, rank, ranks)]
        ds.snapshot(share, path, step=1, rank=rank, world_size=ranks, host_cache="8MiB", block="4MiB").wait_committed()

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(one, range(ranks)))


def _restored(checkpointer: ds.Checkpointer, saved: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> Sample:
    for tensor in live.values():
        tensor.zero_()
    page_cache.drop(Path(checkpointer.directory))
    before = storage_nbytes()
    with stopwatch() as sample:
        checkpointer.restore([Rows(live, 0, 1)])
    fetched = storage_nbytes() - before
    for key, tensor in saved.items():
        if not torch.equal(tensor, live[key]):
            raise AssertionError(f"the restore did not bring {key} back")
    return sample | {"needed": sum(tensor.nbytes for tensor in live.values()), "fetched": fetched}
