"""Measure how fast a checkpoint on a disk comes to a bucket, beside obstore's bare upload, and what a loop loses."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import obstore
from obstore.store import from_url

import datastates as ds
from buckets import _server
from datastates.draining.by_hand import bring_each
from datastates.providers import from_state_dict
from datastates.storage import Location
from measure import Plan, Result, Sample, interleave, stopwatch
from peers.bucket_peers import BUCKET
from states import llm_like, nbytes

_PIECE = 8 << 20
_SIDE = 384


class _Loop:
    """A loop of matrix products on one core."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).normal(size=(_SIDE, _SIDE)).astype(np.float32)

    def beside(self, work: Callable[[], object]) -> float:
        """Steps a second while work is done on another thread, and at least one step."""
        thread, steps, begin = threading.Thread(target=work), 0, time.perf_counter()
        thread.start()
        while thread.is_alive() or not steps:
            self._matrix @ self._matrix
            steps += 1
        return steps / (time.perf_counter() - begin)


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure a drain, and the bare upload of the same bytes from memory; each alone, and beside a loop."""
    state = llm_like(tiny=tiny)
    settings = {
        "datastates": "as datastates drain: read from the page cache, every byte compared, sent from memory",
        "raw": f"obstore.put of {_PIECE >> 20} MiB parts, 12 at once, from memory; nothing is read or compared",
    }
    result = Result(parameters={"bytes": nbytes(state)}, settings=settings)
    with ds.Checkpointer(directory / "first") as checkpointer:
        checkpointer.snapshot([from_state_dict("state", state)], step=0)
    path = Location(directory / "first" / "step-00000000")
    data = np.fromfile(path / "rank-00000.pt", np.uint8)
    targets = (Location(f"{BUCKET}/run-{number}") for number in itertools.count())
    (directory / "server").mkdir()
    with _server(directory / "server"):
        store = from_url(BUCKET)

        def bring() -> None:
            list(bring_each([path], next(targets), lambda now, total: None))

        def put() -> None:
            parts = (data[at : at + _PIECE].data for at in range(0, len(data), _PIECE))
            obstore.put(store, "raw", parts, chunk_size=_PIECE, max_concurrency=12)

        interleave(result, {"raw": partial(_sample, put), "datastates": partial(_sample, bring)}, plan)
    return result


def _sample(work: Callable[[], object]) -> Sample:
    with stopwatch() as alone:
        work()
    return {"seconds": alone["seconds"], "cpu": alone["cpu_seconds"], "steps": _Loop().beside(work)}
