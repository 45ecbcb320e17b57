"""Jobs that resume on another number of ranks than the one that saved, with real DeepSpeed."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from deepspeed_ranks import RANKS

LOOP = Path(__file__).parent / "elastic_loop.py"


@pytest.mark.long
def test_one_rank_resumes_what_two_have_saved(ranks: Any, tmp_path: Path) -> None:
    ranks(2, LOOP, tmp_path, "zero-1", "save", **RANKS)
    ranks(1, LOOP, tmp_path, "zero-1", "load=2", **RANKS)


@pytest.mark.by_hand
def test_every_size_resumes_what_every_other_has_saved(ranks: Any, tmp_path: Path) -> None:
    def run(n: int, *words: str) -> None:
        ranks(n, LOOP, tmp_path, "all", *words, **RANKS)

    run(2, "save")
    run(3, "load=2", "save")
    run(1, "load=2", "save")
    run(2, "load=2", "load=3", "load=1", "refuse")


@pytest.mark.parametrize("partition", [None, 7, 9, 40])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_files_are_asked_for_what_they_hold(count: int, partition: int | None) -> None:
    pytest.importorskip("torch")
    from datastates.formats.zero_files import Flat

    parameters = (("a", (2, 3)), ("b", ()), ("c", (1,)), ("d", (11,)), ("e", (2, 2, 2)))
    total = sum(prod(shape) for _, shape in parameters)
    if partition is not None:
        partition = max(partition, -(-total // count))
    flat = Flat(parameters, count, partition, {})
    layouts = [flat.layout(rank) for rank in range(count)]
    for name, shape in parameters:
        for begin in range(prod(shape)):
            for end in range(begin + 1, prod(shape) + 1):
                held = {
                    rank
                    for rank, layout in enumerate(layouts)
                    for piece in layout.slices
                    if piece.name == name and piece.begin < end and begin < piece.end
                }
                assert set(flat.holders(name, shape, begin, end)) == held
