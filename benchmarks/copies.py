"""Measure how fast a container comes from one rank to another, beside gloo's own rate from memory to memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is in the documentation

import datastates as ds
from datastates.commit import manifest
from datastates.commit.carry import receive, send
from datastates.commit.manifest import named_in
from datastates.providers import from_state_dict
from datastates.ranks.link import Link
from datastates.storage import Location
from measure import Plan, Result, Sample, interleave, stopwatch
from states import llm_like, nbytes

_MESSAGE = 64 << 20
_SILENCE = 30.0


class _End:
    """One end of a link, and of a bare gloo group; the container lies in ``path``, and is sent by rank 0."""

    def __init__(self, rank: int, store: Any, path: Path) -> None:
        self._rank = rank
        self._link = Link(store, "link", rank, 1 - rank, silence=_SILENCE)
        place = dist.PrefixStore("raw", store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(place, rank, 2, timedelta(seconds=_SILENCE))
        self._named = named_in(Location(path), manifest.open(Location(path)))[0]
        self._buffers = [torch.zeros(_MESSAGE, dtype=torch.uint8) for _ in range(2)]

    def copy(self) -> None:
        if self._rank == 0:
            send(self._link, self._named)
            return
        come = self._named.path.with_name("come.pt")
        receive(self._link, replace(self._named, path=come), anew=True)

    def raw(self) -> None:
        works: list[Any] = []
        for at in range(0, self._named.nbytes, _MESSAGE):
            if len(works) == 2:
                works.pop(0).wait()
            some = [self._buffers[at // _MESSAGE % 2][: self._named.nbytes - at]]
            works.append(self._group.send(some, 1, 0) if self._rank == 0 else self._group.recv(some, 0, 0))
        for work in works:
            work.wait()


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure a copy of a container from file to file, and as many bytes through gloo alone, on both ends at once."""
    state = llm_like(tiny=tiny)
    settings = {
        "datastates": "from file to file, both in memory: every byte is compared, and sent in messages of 16 MiB",
        "raw": f"gloo's send and recv of {_MESSAGE >> 20} MiB, two at once, from memory to memory",
    }
    result = Result(parameters={"bytes": nbytes(state)}, settings=settings)
    path = directory / "step-00000000"
    ds.snapshot([from_state_dict("state", state)], path, step=0).wait_committed()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, store.port, path), daemon=True)
    other.start()
    theirs.close()
    try:
        end = _End(0, store, path)
        each = {"raw": end.raw, "datastates": end.copy}
        interleave(result, {name: partial(_sample, ours, name, work) for name, work in each.items()}, plan)
    finally:
        ours.close()
        other.join()
    return result


def _sample(other: Connection, name: str, work: Callable[[], None]) -> Sample:
    other.send(name)
    with stopwatch() as own:
        work()
        cpu_seconds: float = other.recv()
    return {"seconds": own["seconds"], "cpu": own["cpu_seconds"] + cpu_seconds}


def _serve(connection: Connection, port: int, path: Path) -> None:
    end = _End(1, TCPStore("127.0.0.1", port, wait_for_workers=False), path)
    try:
        while True:
            name = connection.recv()
            with stopwatch() as own:
                (end.raw if name == "raw" else end.copy)()
            connection.send(own["cpu_seconds"])
            (path / "come.pt").unlink(missing_ok=True)
    except EOFError:
        return
