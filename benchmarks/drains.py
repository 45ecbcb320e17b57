"""Measure how fast a checkpoint on a disk comes to a bucket, beside obstore's bare upload, and what a loop loses."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import obstore
from obstore.store import from_url

import datastates as ds
from buckets import _server
from datastates.providers import from_state_dict
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
        "datastates": "Checkpointer(tiers=): read from the page cache, every byte compared, sent from memory",
        "raw": f"obstore.put of {_PIECE >> 20} MiB parts, 12 at once, from memory; nothing is read or compared",
    }
    result = Result(parameters={"bytes": nbytes(state)}, settings=settings)
    loop = _Loop()
    (directory / "server").mkdir()
    with ExitStack() as at_end:
        at_end.enter_context(_server(directory / "server"))
        store = from_url(BUCKET, disable_bulk_delete=True)
        first = directory / "first"
        checkpointer = at_end.enter_context(ds.Checkpointer(first, tiers=f"{BUCKET}/run", keep_last=1))
        drain = checkpointer._place.drains._every[0]
        bring, go = drain._bring_next, threading.Event()
        drain._bring_next = lambda: bring() if go.wait(60) else None  # type: ignore[method-assign]
        steps = itertools.count()

        def save() -> None:
            go.clear()
            checkpointer.snapshot([from_state_dict("state", state)], step=next(steps)).wait_committed()

        def bring_it() -> None:
            go.set()
            checkpointer.wait_drained()

        def drained() -> Sample:
            save()
            seconds, cpu = _timed(bring_it)
            save()
            return {"seconds": seconds, "cpu": cpu, "steps": loop.beside(bring_it)}

        def put() -> None:
            parts = (data[at : at + _PIECE].data for at in range(0, len(data), _PIECE))
            obstore.put(store, "raw", parts, chunk_size=_PIECE, max_concurrency=12)

        save()
        bring_it()
        (path,) = first.glob("step-*/rank-00000.pt")
        data = np.fromfile(path, np.uint8)

        def raw() -> Sample:
            seconds, cpu = _timed(put)
            return {"seconds": seconds, "cpu": cpu, "steps": loop.beside(put)}

        interleave(result, {"raw": raw, "datastates": drained}, plan)
    return result


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    with stopwatch() as sample:
        work()
    return sample["seconds"], sample["cpu_seconds"]
