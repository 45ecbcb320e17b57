"""Broadcasts among ranks that torch.distributed numbers differently, or that are not all of its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ranks = Callable[..., list[Any]]

PRELUDE = """
import json, os, sys
import torch
import torch.distributed as dist

import datastates as ds
from datastates.providers import from_state_dict

dist.init_process_group("gloo")
number, numbers = dist.get_rank(), dist.get_world_size()
live = {f"w{i}": torch.arange(50_000.0) + i for i in range(4)}


def provider():
    return from_state_dict("model", live)


def say(*words):
    print(json.dumps(words))


def restore(**world):
    '''Restore into zeros; says which tensors are wrong, or why it failed.'''
    options = {"host_cache": "8MiB", "block": "1MiB", "replicas": "broadcast", "rank_timeout": 20, **world}
    with ds.Checkpointer(sys.argv[1], **options) as ckpt:
        for tensor in live.values():
            tensor.zero_()
        try:
            ckpt.restore([provider()])
        except ds.DatastatesError as error:
            return say(type(error).__name__, str(error), any(bool(t.any()) for t in live.values()))
    say([k for i, (k, t) in enumerate(live.items()) if not torch.equal(t, torch.arange(50_000.0) + i)])


def leave():
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of torch that are left abort a process at times that ends by itself
"""
SAVE = """
with ds.Checkpointer(sys.argv[1], rank=0, world_size=1) as ckpt:
    ckpt.snapshot([provider()], step=1).wait_committed()
"""


def _said(done: list[Any]) -> list[Any]:
    return [json.loads(d.stdout.splitlines()[-1]) for d in done]


def test_ranks_that_torch_numbers_otherwise_send_what_they_have_read(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, PRELUDE + SAVE, tmp_path / "c")
    done = ranks(4, PRELUDE + "restore(rank=[2, 0, 3, 1][number], world_size=4)\nleave()\n", tmp_path / "c")
    assert _said(done) == [[[]]] * 4


def test_some_of_torchs_ranks_are_refused_by_all_that_restore(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, PRELUDE + SAVE, tmp_path / "c")
    part = "if number < 3:\n    restore(rank=number, world_size=3)\nleave()\n"
    done = _said(ranks(4, PRELUDE + part, tmp_path / "c")[:3])
    assert [kind for kind, _, _ in done] == ["RestoreError"] * 3
    assert {text for _, text, _ in done} == {
        "replicas: 'broadcast' needs the ranks that restore to be all those of torch.distributed, each once; "
        "there rank 0 is 0 of 4, rank 1 is 1 of 4, rank 2 is 2 of 4; 'read' does without"
    }
    assert not any(changed for _, _, changed in done)


def test_a_rank_without_torch_distributed_is_told_of_by_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, PRELUDE + SAVE, tmp_path / "c")
    script = PRELUDE + (
        "dist.barrier()\nif number == 1:\n    dist.destroy_process_group()\n    live.clear()\n"
        "restore(rank=number, world_size=2)\nsys.stdout.flush()\nos._exit(0)\n"
    )
    (first, text, _), (second, own, _) = _said(ranks(2, script, tmp_path / "c"))
    assert (first, second) == ("RestoreError", "SettingsError")
    assert text == f"rank 1: {own}"
    assert "needs torch.distributed to be initialized" in own
