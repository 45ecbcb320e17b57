"""What one rank of a team does: train a sharded model, save and restore it through the systems that are compared."""

from __future__ import annotations

import contextlib
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

from measure import Result, Sample, cores, stopwatch
from peers import Roster
from sharded import ShardedLoop
from training import Watch, plain_period


def serve(connection: Connection, rank: int, size: int, port: int, tiny: bool) -> None:
    """Join the others and do what is asked for, until the connection ends.

    Answers each command, a method's name and its arguments, with whether it went well, and what it gave or why not.
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
    member = Member(torch.device("cuda", rank) if gpu else torch.device("cpu"), tiny=tiny)
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
    """One rank's part. All ranks call a method together; its times begin when all are there, and are this rank's."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        self._loop = ShardedLoop(device, tiny=tiny)
        self._gathering = dist.new_group(backend="gloo")
        self._stack = contextlib.ExitStack()
        self._rosters: dict[Path, Roster] = {}
        self._result = Result()

    def nbytes(self) -> int:
        """Bytes of the logical state."""
        return self._loop.nbytes

    def settings(self) -> dict[str, str]:
        """In a line for each system that was used, how it was set."""
        return self._result.settings

    def save(self, system: str, directory: Path, host_cache: int) -> tuple[Sample, Path]:
        """Save through a system in a folder of its own, until durable; where that is."""
        saver = self._roster(directory, host_cache)[system]
        self._loop.fill()
        self._gather()
        with stopwatch() as sample:
            path = saver.save(self._loop.state)
        return {"write": sample["seconds"]}, path

    def restore(self, system: str, directory: Path, host_cache: int, path: Path) -> Sample:
        """Restore what a system saved in that folder, on any number of ranks, and compare all of it."""
        reader = self._roster(directory, host_cache)[system]
        self._loop.wipe()
        self._gather()
        with stopwatch() as sample:
            reader.restore(path, self._loop.state)
            self._loop.synchronize()
        self._loop.check()
        return {"read": sample["seconds"], **reader.tally()}

    def train(self, period: int) -> Sample:
        """So many iterations without a checkpoint."""
        self._warm_up()
        return plain_period(self._loop, period)

    def checkpoint(self, system: str, directory: Path, host_cache: int, period: int) -> tuple[Sample, Path]:
        """Begin to save, train so many iterations, and wait until the checkpoint is durable."""
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
        """Close all systems; what went wrong with some."""
        self._stack.close()
        return self._result.errors

    def _roster(self, directory: Path, host_cache: int) -> Roster:
        if directory not in self._rosters:
            roster = Roster(directory, self._result, host_cache=host_cache)
            self._rosters[directory] = self._stack.enter_context(roster)
        return self._rosters[directory]

    def _warm_up(self) -> None:
        """Train a little, so that what was done before does not tell; and begin with what is no zero and no NaN."""
        self._loop.fill()
        self._loop.iterate()
        self._gather()

    def _gather(self) -> None:
        """Wait until all ranks are here, with nothing left to do."""
        self._loop.synchronize()
        dist.barrier(self._gathering)
