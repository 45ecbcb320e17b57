"""Measure how many requests and bytes torch's Store serves per second.

The server is a process of its own, and the clients are threads of this process: they share the machine's cores.
Therefore the server's CPU seconds are measured as well. They tell what it could serve with a core of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed

from datastates.ranks.store_board import StoreBoard
from datastates.ranks.torch_keys import TorchKeys
from measure import Sample

_SILENCE = 60.0
_TIMES = 50
_TICK = 1 / os.sysconf("SC_CLK_TCK")
"""The unit in which the kernel counts CPU time, in seconds."""
_distributed: Any = torch.distributed


@dataclass(frozen=True)
class Server:
    """A Store's server in a process of its own."""

    port: int
    process: int

    def cpu(self) -> float:
        """The server's CPU seconds so far."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server() -> Iterator[Server]:
    """Start a server, which ends with the block."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Server(int(process.stdout.readline()), process.pid)
        finally:
            process.stdin.close()  # the server ends with its input


def connect(server: Server) -> Any:
    """A client of the server."""
    return _distributed.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def _together(call: Callable[[Any], None], connections: list[Any]) -> float:
    """Call a function with each connection, each on its own thread; returns the seconds until all are done."""
    with ThreadPoolExecutor(len(connections)) as pool:
        begin = time.perf_counter()
        list(pool.map(call, connections))
        return time.perf_counter() - begin


def votes(server: Server, vote: bytes, count: int, threads: int, name: str) -> tuple[Sample, Sample]:
    """Leave ``count`` votes as that many ranks would, and read them as the coordinator does."""

    def leave(ranks: range) -> Callable[[], None]:
        # one board stands for many ranks, as a rank's own thread and connection are not to be measured
        board = StoreBoard(TorchKeys(connect(server), 0, silence=_SILENCE), name)
        board.run  # noqa: B018 - asked for once, and known from then on

        def go() -> None:
            for rank in ranks:
                board._rank = rank
                board.put("votes", vote)

        return go

    shares = [range(first, count, threads) for first in range(threads)]
    boards = [leave(share) for share in shares]
    cpu = server.cpu()
    seconds = _together(lambda go: go(), boards)
    left = server.cpu()
    reader = StoreBoard(TorchKeys(connect(server), 0, silence=_SILENCE), name)
    begin = time.perf_counter()
    found = reader.read("votes", range(count))
    took = time.perf_counter() - begin
    asked = server.cpu()
    if len(found) != count or found[count - 1] != vote:
        raise RuntimeError("votes were lost")
    reader.drop("votes", range(count))
    nbytes = count * len(vote)
    return (
        {"seconds": seconds, "bytes_per_s": nbytes / seconds, "cpu_seconds": max(left - cpu, _TICK)},
        {"seconds": took, "bytes_per_s": nbytes / took, "cpu_seconds": max(asked - left, _TICK)},
    )


def looks(server: Server, count: int, threads: int) -> Sample:
    """Look ``count`` times for an answer that is not there."""

    def look(store: Any) -> None:
        for _ in range(count // threads):
            store.check(["answer"])

    connections = [connect(server) for _ in range(threads)]
    cpu = server.cpu()
    seconds = _together(look, connections)
    count = count // threads * threads
    return {
        "seconds": seconds,
        "requests_per_s": count / seconds,
        "request_seconds": max(server.cpu() - cpu, _TICK) / count,
    }


def many_keys(server: Server, count: int) -> Sample:
    """Ask one question about many keys, all of which exist."""
    store = connect(server)
    keys = [f"some/longer/name/of/votes/{i}" for i in range(count)]
    for key in keys:
        store.set(key, b"")
    begin, cpu = time.perf_counter(), server.cpu()
    for _ in range(_TIMES):
        if not store.check(keys):
            raise RuntimeError("keys were lost")
    seconds = (time.perf_counter() - begin) / _TIMES
    return {"seconds": seconds, "key_seconds": max(server.cpu() - cpu, _TICK) / count / _TIMES}


def _serve() -> None:
    store = _distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(1, f"{store.port}\n".encode())
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
