"""One rank of a team: it trains a sharded model, and saves and restores it through the compared systems."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is in the documentation

from measure import Result, Sample, cores, stopwatch, storage_nbytes
from peers import Roster
from sharded import Kind, ShardedLoop
from training import Watch, plain_period


def serve(connection: Connection, rank: int, size: int, port: int, kind: Kind, cut: int) -> None:
    """Join the other ranks, and run commands until the connection ends.

    A command is the name of a method of :class:`Member` and its arguments. The answer says whether the method
    succeeded, and holds its result or the text of its error.
    """
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in here.items()})
    for interface in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(interface, "lo")
    torch.set_num_threads(max(1, cores() // size))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=size)
    member = Member(torch.device("cuda", rank) if gpu else torch.device("cpu"), kind, cut)
    while (asked := _next(connection)) is not None:
        command, arguments = asked
        try:
            answer = (True, getattr(member, command)(**arguments))
        except Exception as error:  # for the benchmark to record
            traceback.print_exception(error)
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)
    dist.destroy_process_group()


def _next(connection: Connection) -> tuple[str, dict[str, Any]] | None:
    try:
        asked: tuple[str, dict[str, Any]] = connection.recv()
    except EOFError:
        return None
    return asked


class Member:
    """One rank's part in a team.

    All ranks call each method together. The times are this rank's, and begin when all ranks have come.
    """

    def __init__(self, device: torch.device, kind: Kind, cut: int) -> None:
        self._loop = ShardedLoop(device, kind, cut)
        self._gathering = dist.new_group(backend="gloo")
        self._stack = contextlib.ExitStack()
        self._rosters: dict[Path, Roster] = {}
        self._result = Result()

    def nbytes(self) -> int:
        """Bytes of the logical state."""
        return self._loop.nbytes

    def settings(self) -> dict[str, str]:
        """For each system that was used, its settings in one line."""
        return self._result.settings

    def save(self, system: str, directory: Path, host_cache: int) -> tuple[Sample, Path]:
        """Save through a system until the checkpoint is durable; returns the sample and the checkpoint's path."""
        saver = self._roster(directory, host_cache)[system]
        self._loop.fill()
        self._gather()
        with stopwatch() as sample:
            path = saver.save(self._loop.state)
        return {"write": sample["seconds"]}, path

    def restore(self, system: str, directory: Path, host_cache: int, path: Path) -> Sample:
        """Restore a checkpoint, saved by any number of ranks, through a system, and compare every element."""
        reader = self._roster(directory, host_cache)[system]
        self._loop.wipe()
        self._gather()
        before = storage_nbytes()
        with stopwatch() as sample:
            reader.restore(path, self._loop.state)
            self._loop.synchronize()
        fetched = storage_nbytes() - before
        self._loop.check()
        return {"read": sample["seconds"], "needed": self._loop.local_nbytes, "fetched": fetched}

    def train(self, period: int) -> Sample:
        """Train for ``period`` iterations without a checkpoint."""
        self._warm_up()
        return plain_period(self._loop, period)

    def checkpoint(self, system: str, directory: Path, host_cache: int, period: int) -> tuple[Sample, Path]:
        """Begin to save, train for ``period`` iterations, and wait until the checkpoint is durable."""
        saver = self._roster(directory, host_cache)[system]
        self._warm_up()
        begin = time.perf_counter()
        pending = saver.save_async(self._loop.state)
        sample = {"call": time.perf_counter() - begin}
        watch = Watch(pending)
        for _ in range(period):
            self._loop.iterate(saver.gate)
        self._loop.synchronize()
        sample["seconds"] = time.perf_counter() - begin
        watch.join()
        sample["durable"] = watch.at - begin
        return sample, pending.path

    def close(self) -> dict[str, str]:
        """Close all systems; returns the errors by system."""
        self._stack.close()
        return self._result.errors

    def _roster(self, directory: Path, host_cache: int) -> Roster:
        if directory not in self._rosters:
            roster = Roster(directory, self._result, host_cache=host_cache)
            self._rosters[directory] = self._stack.enter_context(roster)
        return self._rosters[directory]

    def _warm_up(self) -> None:
        """Train one iteration from values without zeros and NaNs, so that earlier work does not affect the figures."""
        self._loop.fill()
        self._loop.iterate()
        self._gather()

    def _gather(self) -> None:
        """Wait until all ranks are here and have finished their work, the collection of garbage included.

        A full collection takes 0.15 s, as long as a restore. Else one system would pay for the others' garbage.
        """
        self._loop.synchronize()
        gc.collect()
        dist.barrier(self._gathering)
