"""What the tests of several ranks share: reports of ranks, and threads that act as ranks."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from memory_keys import Memory, MemoryKeys

from datastates import api, checkpointer
from datastates.errors import DatastatesError
from datastates.ranks.board_world import BoardWorld
from datastates.ranks.keys import Place
from datastates.ranks.link import Link
from datastates.ranks.store_board import StoreBoard
from datastates.ranks.world import SoloWorld, World

sys.path.insert(0, str(Path(__file__).parent))  # the states that these tests share
import per_host_job

job, machines = per_host_job.job, per_host_job.machines

Reports = list[dict[str, dict[str, Any]]]


@pytest.fixture
def reports() -> Callable[[list[subprocess.CompletedProcess[str]]], Reports]:
    """What each rank of rank_loop.py has said, by word."""
    return lambda done: [{said["word"]: said for said in map(json.loads, d.stdout.splitlines())} for d in done]


@pytest.fixture
def prelude() -> str:
    """The beginning of a script that is another training loop, made of the parts of rank_loop.py."""
    return f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rank_loop import *

directory, state = Path(sys.argv[1]), make()
begin_together(directory)
"""


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of ``threads`` make links to each other."""
    monkeypatch.setattr(Memory, "links", pytest.importorskip("torch.distributed").HashStore())


T = TypeVar("T")
Threads = Callable[[int, Callable[[int], T]], "list[T | DatastatesError]"]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads[Any]:
    """Run a function on several threads of this process, which act as ranks and meet in memory.

    ``threads(n, function)`` calls ``function(rank)``, and gives for each rank what it returned, or the DatastatesError
    that it raised. With threads, hundreds of checkpoints take seconds; with processes they would take minutes.
    """
    here = threading.local()

    for module in (api, checkpointer):
        monkeypatch.setattr(module, "open_world", lambda settings, directory: next(here.worlds))

    def run(n: int, function: Callable[[int], T]) -> list[T | DatastatesError]:
        memory = Memory()

        def one(rank: int) -> T | DatastatesError:
            here.worlds = (_world(memory, rank, n, number) for number in itertools.count())
            try:
                return function(rank)
            except DatastatesError as error:
                return error

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(one, range(n)))

    return run


def _world(memory: Memory, rank: int, n: int, number: int) -> World:
    if n == 1:
        return SoloWorld()
    board = StoreBoard(MemoryKeys(memory, rank), f"run/{number}")
    return BoardWorld(rank, n, board, timeout=20, place=_place(memory, rank, n))


def _place(memory: Memory, rank: int, n: int) -> Place | None:
    if memory.links is None:
        return None

    def link(name: str, other: int, silence: float) -> Link:
        return Link(memory.links, name, rank, other, silence=silence)

    return Place(rank, n, memory, lambda silence: MemoryKeys(memory, rank), link)
