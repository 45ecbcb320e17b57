"""Saving and loading with torch.distributed.checkpoint: states, and several ranks."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from datastates import _native
from datastates._base import faults
from datastates.adapters.dcp.save import async_save
from datastates.ranks.board_world import BoardWorld
from datastates.ranks.store_board import StoreBoard
from datastates.ranks.torch_keys import TorchKeys
from datastates.saving import gate

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # what these tests share

Run = Callable[..., "list[subprocess.CompletedProcess[str]]"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that no test leaves a fault, a thread, or a snapshot that an optimizer would wait for."""
    before = set(threading.enumerate())
    yield
    _native.clear_faults()
    faults.clear()
    gate.pass_all()
    end = time.monotonic() + 10
    while left := [t for t in threading.enumerate() if t not in before and t.name.startswith(("datastates-", "Async"))]:
        assert time.monotonic() < end, f"still there: {left}"
        gc.collect()  # an error's frames may keep a writer alive, and the writer keeps its idle threads
        time.sleep(0.02)


@pytest.fixture
def train(ranks: Any) -> Run:
    """Run a script, which may use all of training.py, on ``n`` ranks: ``train(n, script, *arguments, **options)``."""

    def run(n: int, script: str, *arguments: object, **options: Any) -> list[subprocess.CompletedProcess[str]]:
        begin = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom training import *\nbegin()\n"
        source = begin + textwrap.dedent(script) + "\nend()\n"
        done: list[subprocess.CompletedProcess[str]] = ranks(n, source, *arguments, **{"timeout": 120, **options})
        return done

    return run


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Run a function on ``n`` threads. ``async_save`` takes each thread for a rank, and they meet in one store.

    ``together(n, function)`` calls ``function(rank)``, and gives for each rank what it returned or raised. Ranks keep
    their worlds between calls.
    """
    worlds: dict[int, list[BoardWorld]] = {}
    here = threading.local()
    monkeypatch.setattr(async_save, "world_of", lambda *_: here.world)

    def run(n: int, function: Callable[[int], Any]) -> list[Any]:
        if n not in worlds:
            store = dist.HashStore()
            boards = [
                StoreBoard(TorchKeys(dist.PrefixStore("job", store), rank, silence=30), "run/1") for rank in range(n)
            ]
            worlds[n] = [BoardWorld(rank, n, board, timeout=5) for rank, board in enumerate(boards)]

        def one(rank: int) -> Any:
            here.world = worlds[n][rank]
            try:
                return function(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(one, range(n)))

    yield run
    for made in worlds.values():
        for world in reversed(made):
            world.close()


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the items that torch's own reader reads, in order."""
    names: list[str] = []
    original = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        names.extend(item.storage_index.fqn for item in plan.items)
        return original(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", read_data)
    return names
