"""What the tests of several ranks share: what ranks say, and ranks as threads."""

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
import torch.distributed as distributed

from datastates import _calls
from datastates.errors import DatastatesError
from datastates.ranks.board_world import BoardWorld
from datastates.ranks.store_board import StoreBoard
from datastates.ranks.store_calls import StoreCalls
from datastates.ranks.world import SoloWorld, World

sys.path.insert(0, str(Path(__file__).parent))  # the states that these tests share

Reports = list[dict[str, dict[str, Any]]]


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

    monkeypatch.setattr(_calls, "open_world", lambda settings, directory: next(here.worlds))

    def run(n: int, function: Callable[[int], T]) -> list[T | DatastatesError]:
        store = distributed.HashStore()

        def one(rank: int) -> T | DatastatesError:
            here.worlds = (_world(store, rank, n, number) for number in itertools.count())
            try:
                return function(rank)
            except DatastatesError as error:
                return error

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(one, range(n)))

    return run


def _world(store: Any, rank: int, n: int, number: int) -> World:
    if n == 1:
        return SoloWorld()
    board = StoreBoard(StoreCalls(distributed.PrefixStore("job", store), rank, silence=20), f"run/{number}")
    return BoardWorld(rank, n, board, timeout=20)
