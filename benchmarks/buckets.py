"""Measure how fast a state goes to a bucket and comes back, beside obstore's bare requests for the same bytes.

The server runs on the same machine and takes part of its processors, the same for all systems. The peers are not among
the extras of the package: ``pip install s3fs==2026.9.0 s3torchconnector==1.5.0``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import obstore
from obstore.store import from_url

from measure import Plan, Result, Sample, interleave, stopwatch
from peers import Roster
from peers.bucket_peers import BUCKET
from states import Probe, llm_like, nbytes

SYSTEMS = ("datastates from a bucket", "DCP with s3fs", "DCP with s3torchconnector")
_SERVER = "localbucket"
_PIECE, _AT_ONCE = 8 << 20, 32


@contextmanager
def _server(folder: Path) -> Iterator[None]:
    """An empty bucket, served as the tests do it. The variables of the environment name the server."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    with importlib.import_module("servers").server(_SERVER, folder) as environment:
        os.environ.update(environment)
        yield


class _Bare:
    """Requests for all bytes of a checkpoint, in pieces of 8 MiB, from and to memory that is there."""

    settings = (
        f"obstore.put of {_PIECE >> 20} MiB parts, 12 at once; obstore.get_range of as many bytes by {_AT_ONCE} "
        "threads, copied into memory; nothing is verified"
    )

    def __init__(self, path: Path) -> None:
        self._store = from_url(BUCKET)
        prefix = f"{path.parent.name}/{path.name}"
        found = [entry for page in obstore.list(self._store, prefix) for entry in page]
        self._files: Sequence[tuple[str, np.ndarray]] = [(e["path"], np.ones(e["size"], np.uint8)) for e in found]
        self._threads = ThreadPoolExecutor(_AT_ONCE)

    def put(self) -> Sample:
        with stopwatch() as sample:
            for name, data in self._files:
                parts = (data[at : at + _PIECE].data for at in range(0, len(data), _PIECE))
                obstore.put(self._store, f"raw/{name}", parts, chunk_size=_PIECE, max_concurrency=12)
        return _named("put", sample)

    def get(self) -> Sample:
        pieces = [(name, into, at) for name, into in self._files for at in range(0, len(into), _PIECE)]
        with stopwatch() as sample:
            list(self._threads.map(self._one, pieces))
        return _named("get", sample)

    def _one(self, piece: tuple[str, np.ndarray, int]) -> None:
        name, into, at = piece
        part = into[at : at + _PIECE]
        data = memoryview(obstore.get_range(self._store, name, start=at, length=len(part)))
        np.copyto(part, np.frombuffer(data, np.uint8))


def _remove(path: Path) -> None:
    store = from_url(BUCKET, disable_bulk_delete=True)
    found = [e["path"] for page in obstore.list(store, f"{path.parent.name}/{path.name}") for e in page]
    for name in found:
        obstore.delete(store, name)


def _named(verb: str, sample: Sample) -> Sample:
    return {verb: sample["seconds"], f"{verb}_cpu": sample["cpu_seconds"]}


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure all systems, and the bare requests. What a round has put is removed."""
    state = llm_like(tiny=tiny)
    probe = Probe(state)
    result = Result(parameters={"bytes": nbytes(state)}, settings={"raw": _Bare.settings, "server": _SERVER})
    (directory / "server").mkdir()
    with _server(directory / "server"), Roster(directory, result) as roster:
        bare = _Bare(roster[SYSTEMS[0]].save(state))

        def put_and_get(name: str) -> Sample:
            with stopwatch() as put:
                path = roster[name].save(state)
            probe.wipe()
            with stopwatch() as got:
                roster[name].restore(path, state)
            probe.check()
            _remove(path)
            return {**_named("put", put), **_named("get", got)}

        def raw() -> Sample:
            return {**bare.put(), **bare.get()}

        actions: dict[str, Callable[[], Sample]] = {
            "raw": raw,
            **{name: partial(put_and_get, name) for name in SYSTEMS},
        }
        interleave(result, actions, plan)
    return result
