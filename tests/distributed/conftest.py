"""Several processes at once, as torchrun starts them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as distributed

from datastates import checkpoint
from datastates.agreement import BoardWorld
from datastates.barrier import SoloWorld
from datastates.errors import DatastatesError
from datastates.store_board import StoreBoard

sys.path.insert(0, str(Path(__file__).parent))  # the states that these tests share

Ranks = Callable[..., "list[subprocess.CompletedProcess[str]]"]
Reports = list[dict[str, dict[str, Any]]]
# once one rank has failed, how long the others may take to say why they did
AFTERMATH_SECONDS = 5


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Run Python as each of several ranks, to the end of all; gives one completed process for each, in order.

    ``ranks(n, script, *arguments, timeout=60, may_fail=(), **variables)``: ``script`` is a file (a Path) or a source (a
    str). A rank that does not end in time, or that fails and is not among ``may_fail``, fails the test with the output
    of all. No process outlives the test. It may be called on several threads at once.
    """
    started: list[subprocess.Popen[str]] = []
    numbers = itertools.count()

    def run(
        n: int,
        script: Path | str,
        *arguments: object,
        timeout: float = 60,
        may_fail: Collection[int] = (),
        **variables: str,
    ) -> list[subprocess.CompletedProcess[str]]:
        logs = tmp_path / f"ranks-{next(numbers)}"
        logs.mkdir()
        if isinstance(script, str):
            (logs / "script.py").write_text(textwrap.dedent(script))
            script = logs / "script.py"
        shared = {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # a store that goes away is logged with long stacks
            **variables,
        }
        processes = []
        for rank in range(n):
            with (logs / f"{rank}.out").open("w") as out, (logs / f"{rank}.err").open("w") as err:
                process = subprocess.Popen(
                    [sys.executable, str(script), *map(str, arguments)],
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=out,
                    stderr=err,
                    text=True,
                    start_new_session=True,
                )
            processes.append(process)
            started.append(process)
        problem = _wait(processes, timeout, may_fail)
        for process in processes:
            _kill(process)
        done = [
            subprocess.CompletedProcess(
                p.args, p.returncode, (logs / f"{rank}.out").read_text(), (logs / f"{rank}.err").read_text()
            )
            for rank, p in enumerate(processes)
        ]
        if problem:
            shown = (f"--- rank {r}: {d.returncode}\n{d.stdout}\n{d.stderr}" for r, d in enumerate(done))
            pytest.fail("\n".join([problem, *shown]))
        return done

    yield run
    for process in started:
        _kill(process)


@pytest.fixture
def reports() -> Callable[[list[subprocess.CompletedProcess[str]]], Reports]:
    """What each rank of rank_loop.py has said, by word."""
    return lambda done: [{said["word"]: said for said in map(json.loads, d.stdout.splitlines())} for d in done]


@pytest.fixture
def prelude() -> str:
    """What a script begins with that is another training loop with the parts of rank_loop.py."""
    return f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rank_loop import *

directory, state = Path(sys.argv[1]), make()
begin_together(directory)
"""


T = TypeVar("T")
Threads = Callable[[int, Callable[[int], T]], "list[T | DatastatesError]"]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads[Any]:
    """Run a function of the rank as each of several ranks, threads of this process that meet in a store in memory.

    ``threads(n, function)`` gives for each rank what it returned, or the DatastatesError that it raised. Hundreds of
    checkpoints so cost seconds, where processes would cost minutes.
    """
    here = threading.local()

    class Numbers:
        """Numbers what a rank does; every process has its own, and here every thread."""

        def __next__(self) -> int:
            return next(here.numbers)

    monkeypatch.setattr(checkpoint, "_world", lambda settings, directory: here.world)
    monkeypatch.setattr(checkpoint, "_numbers", Numbers())

    def run(n: int, function: Callable[[int], T]) -> list[T | DatastatesError]:
        worlds = [SoloWorld()] if n == 1 else _worlds(n)

        def one(rank: int) -> T | DatastatesError:
            here.world, here.numbers = worlds[rank], itertools.count()
            try:
                return function(rank)
            except DatastatesError as error:
                return error

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(one, range(n)))

    return run


def _worlds(n: int) -> list[Any]:
    store = distributed.HashStore()
    boards = [StoreBoard(distributed.PrefixStore("job", store), rank, "run/1", silence=20) for rank in range(n)]
    return [BoardWorld(rank, n, board, timeout=20) for rank, board in enumerate(boards)]


def _wait(processes: list[subprocess.Popen[str]], timeout: float, may_fail: Collection[int]) -> str | None:
    """Wait until all have ended; says what went wrong."""
    end, problem = time.monotonic() + timeout, None
    while any(p.poll() is None for p in processes):
        failed = [r for r, p in enumerate(processes) if r not in may_fail and p.poll() not in (None, 0)]
        if failed and problem is None:
            problem = f"rank {failed[0]} failed"
            end = min(end, time.monotonic() + AFTERMATH_SECONDS)
        if time.monotonic() > end:
            running = [r for r, p in enumerate(processes) if p.poll() is None]
            return problem or f"ranks {running} still running after {timeout} s"
        time.sleep(0.02)
    failed = [r for r, p in enumerate(processes) if r not in may_fail and p.returncode != 0]
    return problem or (f"rank {failed[0]} failed" if failed else None)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
