"""Measure what a commit and an open cost at 16,384 ranks of 1,000 shards: CPU time, bytes, and simulated time.

This needs no training framework and no second machine: :mod:`layouts` makes the claims and indexes out of numbers.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from commit_model import Setting, simulate
from datastates.commit import catalog, manifest
from datastates.commit.catalog import Catalog
from datastates.commit.claims import PRIME, claims_of, whole_claims
from datastates.commit.votes import File, Vote
from datastates.container import archive
from datastates.ranks.board_world import BoardWorld, token_of
from datastates.ranks.store_board import StoreBoard
from datastates.ranks.torch_keys import TorchKeys
from datastates.storage import Location
from datastates.storage.stores import reader
from layouts import NAMES, Layout
from measure import Plan, Result, Sample, answer, in_new_process, interleave, status

LATENCIES = (50e-6, 1e-3)
SKEW = 2.0
BYTE = 1e-9
METADATA = 3e-4
STORAGE = 1e9
AT_ONCE = 32
"""Containers whose lengths the coordinator asks for at one time."""


def _sizes(tiny: bool) -> tuple[tuple[int, ...], int]:
    """The numbers of ranks to measure, and the number of shards on each rank."""
    return ((4, 8, 16), 20) if tiny else ((64, 1_024, 16_384), 1_000)


def _seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """The CPU seconds of an action, which other work on the machine affects less than wall time, and its result."""
    begin = time.process_time()
    result = action()
    return time.process_time() - begin, result


def _load() -> float:
    """The load of the machine over the last minute."""
    return os.getloadavg()[0]


def _name(layout: str, ranks: int) -> str:
    return f"{layout}, {ranks:,} ranks"


@dataclass
class Scale:
    """The benchmarks of the scale suite. The simulation takes its figures from the benchmarks that ran before it."""

    results: dict[str, Result] = field(default_factory=dict)

    def _begin(self, name: str, **parameters: Any) -> Result:
        self.results[name] = Result(parameters={**parameters, "load": _load()})
        return self.results[name]

    def rank(self, directory: Path, plan: Plan, *, tiny: bool) -> Result:
        """Measure what every rank does by itself."""
        (*_, ranks), tensors = _sizes(tiny)
        result = self._begin("rank", ranks=ranks, tensors=tensors)
        interleave(result, {name: partial(_rank, Layout(name, ranks, tensors)) for name in NAMES}, plan)
        return result

    def agreement(self, directory: Path, plan: Plan, *, tiny: bool) -> Result:
        """Count the calls of a commit to the Store, with threads as ranks."""
        sizes = (2, 4) if tiny else (4, 16, 64)
        result = self._begin("agreement")
        actions = {f"{n} ranks": partial(_calls, n) for n in sizes}
        interleave(result, actions, Plan(1), warm_up=False)
        return result

    def store(self, directory: Path, plan: Plan, *, tiny: bool) -> Result:
        """Measure what load the Store's server can take."""
        import store_load

        _, tensors = _sizes(tiny)
        vote = _vote(Layout("FSDP", 4, tensors), 1)
        count, threads, asked = (32, 2, 200) if tiny else (2_048, 4, 20_000)
        result = self._begin("store", vote=len(vote), votes=count, looks=asked, writers=threads)
        with store_load.server() as server:
            run = 0

            def votes() -> Sample:
                nonlocal run
                run += 1
                left, read = store_load.votes(server, vote, count, threads, f"run{run}")
                return {f"{way}_{k}": v for way, one in (("in", left), ("out", read)) for k, v in one.items()}

            actions: dict[str, Callable[[], Sample]] = {
                "votes": votes,
                "looks of one client": partial(store_load.looks, server, asked // 4, 1),
                "looks of 8 clients": partial(store_load.looks, server, asked, 8),
                "one question about many keys": partial(store_load.many_keys, server, count),
            }
            interleave(result, actions, plan)
        return result

    def coordinator(self, directory: Path, plan: Plan, *, tiny: bool) -> Result:
        """Measure what rank 0 does with the votes, each sample in a process of its own."""
        sizes, tensors = _sizes(tiny)
        result = self._begin("coordinator", tensors=tensors)
        actions = {
            _name(name, ranks): partial(_in_child, name, ranks, tensors, None) for name in NAMES for ranks in sizes
        }
        interleave(result, actions, plan, warm_up=False)
        return result

    def restore(self, directory: Path, plan: Plan, *, tiny: bool) -> Result:
        """Measure what a rank reads to find out where its state is stored."""
        (*_, ranks), tensors = _sizes(tiny)
        others = 3 * ranks // 4
        needed = {"step": 10**6, "attempt": "0" * 8, "file": catalog.FILE, "nbytes": 1 << 30, "head_crc32": 2**32 - 1}
        result = self._begin(
            "restore",
            ranks=ranks,
            tensors=tensors,
            others=others,
            block=catalog.BLOCK,
            needed=len(json.dumps(needed)),
        )
        actions: dict[str, Callable[[], Sample]] = {}
        for name in NAMES:
            folder = directory / name.replace(" ", "-")
            folder.mkdir()
            head = int(_in_child(name, ranks, tensors, folder)["head_crc32"])
            layout = Layout(name, ranks, tensors)
            actions[f"{name}, as saved"] = partial(_look_up, folder, head, layout, ranks)
            if name != "own keys":
                actions[f"{name}, on {others:,} ranks"] = partial(_look_up, folder, head, layout, others)
        actions["manifest.json"] = partial(_open_manifest, directory / NAMES[0])
        interleave(result, actions, plan)
        for file in directory.glob("*/*"):
            file.unlink()
        return result

    def commit(self, directory: Path, plan: Plan, *, tiny: bool) -> Result:
        """Simulate commits, with figures of the benchmarks before."""
        sizes, _ = _sizes(tiny)
        try:
            coordinator, store = self.results["coordinator"].samples, self.results["store"].samples
            request = _median(store["looks of 8 clients"], "request_seconds")
            key = _median(store["one question about many keys"], "key_seconds")
            votes = {n: coordinator[_name("FSDP", n)] for n in sizes}
        except KeyError as error:
            raise RuntimeError(f"the simulation takes its figures from {error}, which was not measured") from None
        result = self._begin(
            "commit",
            request=request,
            key=key,
            byte=BYTE,
            skew=SKEW,
            metadata=METADATA,
            storage=STORAGE,
            at_once=AT_ONCE,
        )
        actions: dict[str, Callable[[], Sample]] = {}
        for n, samples in votes.items():
            cpu = sum(_median(samples, f) for f in ("decode", "cover", "catalog", "manifest"))
            written = (_median(samples, "catalog_bytes") + _median(samples, "manifest_bytes")) / STORAGE
            vote = int(_median(samples, "vote_bytes")) // n
            for latency in LATENCIES:
                decide = cpu + written + n * METADATA / AT_ONCE
                setting = Setting(n, SKEW, latency, request, BYTE, key, vote, decide)
                actions[f"{n:,} ranks, {latency * 1e6:,.0f} µs"] = _Simulated(setting)
        interleave(result, actions, plan, warm_up=False)
        return result

    def suite(self) -> dict[str, Callable[..., Result]]:
        """The benchmarks by name, in the order in which they depend on each other."""
        return {
            "rank": self.rank,
            "agreement": self.agreement,
            "store": self.store,
            "coordinator": self.coordinator,
            "restore": self.restore,
            "commit": self.commit,
        }


def _median(samples: list[Sample], figure: str) -> float:
    return statistics.median(sample[figure] for sample in samples)


class _Simulated:
    """A simulation. Each call takes another seed, so that the ranks persist at other moments."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._seed = 0

    def __call__(self) -> Sample:
        self._seed += 1
        o = simulate(self._setting, self._seed)
        return {
            "heard": o.heard,
            "committed": o.committed,
            "first": o.first,
            "last": o.last,
            "requests": o.requests,
            "busy": o.busy,
            "decide": self._setting.decide,
        }


# --- a rank's own part


def _vote(layout: Layout, rank: int) -> bytes:
    return _whole_vote(layout.ranks, rank, layout.claims(rank))


def _whole_vote(ranks: int, rank: int, claims: Any) -> bytes:
    return Vote(step=1, files=(File(f"rank-{rank:05d}.pt", 1 << 30, rank * 40503 % 2**32, claims),)).encode()


def _rank(layout: Layout) -> Sample:
    rank = layout.ranks // 3
    index = layout.index(rank)
    claimed, claims = _seconds(lambda: claims_of(index.shards))
    voted, vote = _seconds(lambda: _whole_vote(layout.ranks, rank, whole_claims(claims, index)))
    encoded, (tail, _) = _seconds(lambda: archive.encode_tail(index, b""))
    token, _ = _seconds(lambda: token_of("0123456789abcdef", "step-00000001/1"))
    return {
        "claims": claimed,
        "vote": voted,
        "vote_bytes": len(vote),
        "index": encoded,
        "index_bytes": len(tail),
        "token": token,
    }


class _Counting:
    """A Store that counts the calls to it."""

    def __init__(self, store: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.calls[name] += 1
            return call(*arguments)

        return counted


def _calls(ranks: int) -> Sample:
    """Count the calls of one agreement among ``ranks`` ranks. A look is a question that a rank may have to repeat."""
    distributed: Any = importlib.import_module("torch.distributed")
    store = distributed.HashStore()
    counters = [_Counting(store) for _ in range(ranks)]
    worlds = [
        BoardWorld(rank, ranks, StoreBoard(TorchKeys(counter, rank, silence=60.0), "scale"), timeout=60.0)
        for rank, counter in enumerate(counters)
    ]
    for world in worlds:
        world.token("step")
    for counter in counters:
        counter.calls.clear()
    threads = [threading.Thread(target=world.agree, args=("step", b"vote", lambda _: b"done")) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = (counter.calls.copy() for counter in counters)
    for world in reversed(worlds):
        world.close()
    return {
        "rank_calls": max(sum(calls.values()) - calls["check"] for calls in others),
        "rank_calls_least": min(sum(calls.values()) - calls["check"] for calls in others),
        "rank_looks": statistics.median(calls["check"] for calls in others),
        "coordinator_calls": sum(first.values()) - first["add"] + 1,
    }


# --- the coordinator's part


def _in_child(layout: str, ranks: int, tensors: int, folder: Path | None) -> Sample:
    return in_new_process(__file__, layout, ranks, tensors, *([folder] if folder else []))


def _coordinate(layout: Layout, folder: Path | None) -> Sample:
    """Do what ``Ballot`` does with the votes, one step after the other. The files go to ``folder``, if it is given."""
    own = status("VmRSS")
    votes = {rank: _vote(layout, rank) for rank in range(layout.ranks)}
    Path("/proc/self/clear_refs").write_text("5")
    decode, decoded = _seconds(lambda: {rank: Vote.decode(data) for rank, data in votes.items()})
    files = [vote.files[0] for vote in decoded.values()]
    claims: list[Any] = [file.claims for file in files]
    cover, total = _seconds(lambda: sum(c.cover for c in claims) % PRIME)
    if total:
        raise RuntimeError("the parts do not make whole tensors")
    nbytes = np.array([file.nbytes for file in files], np.uint64)
    crcs = np.array([file.index_crc32 for file in files], np.uint32)
    catalogued, (encoded, head_crc) = _seconds(lambda: catalog.encode_catalog(claims, nbytes, crcs))

    def manifested() -> bytes:
        entries = tuple(
            manifest.ContainerEntry(file=file.name, rank=rank, nbytes=file.nbytes, index_crc32=file.index_crc32)
            for rank, file in enumerate(files)
        )
        return manifest.encode(
            manifest.Manifest(
                format=manifest.FORMAT_VERSION,
                step=1,
                sequence=1,
                attempt="00000000",
                created=manifest.now(),
                world_size=layout.ranks,
                containers=entries,
                catalog=manifest.CatalogEntry(file=catalog.FILE, nbytes=len(encoded), head_crc32=head_crc),
            )
        )

    manifest_seconds, manifest_bytes = _seconds(manifested)
    if folder is not None:
        (folder / catalog.FILE).write_bytes(encoded)
        (folder / manifest.FILE).write_bytes(manifest_bytes)
    return {
        "vote_bytes": sum(map(len, votes.values())),
        "decode": decode,
        "cover": cover,
        "catalog": catalogued,
        "catalog_bytes": len(encoded),
        "manifest": manifest_seconds,
        "manifest_bytes": len(manifest_bytes),
        "memory": status("VmHWM") - own,
        "head_crc32": head_crc,
    }


# --- a rank that restores


def _look_up(folder: Path, head_crc: int, layout: Layout, ranks: int) -> Sample:
    """Find where all tensors of one of ``ranks`` ranks are stored. The catalog is in the page cache."""
    path = folder / catalog.FILE
    reads: list[int] = []
    from_file = reader(Location(path))

    def read(offset: int, length: int) -> bytes:
        reads.append(length)
        return from_file(offset, length)

    rank = ranks // 3
    claims = layout.claims(rank)
    shares = [(int(n) * rank // ranks, int(n) * (rank + 1) // ranks) for n in layout.numels]
    if ranks == layout.ranks:
        shares = list(zip(claims.begin.tolist(), claims.end.tolist(), strict=True))
    opened, found = _seconds(lambda: Catalog(read, path.stat().st_size, head_crc))
    head = sum(reads)
    reads.clear()

    def look() -> set[int]:
        holders: set[int] = set()
        for key, share in zip(claims.key.tolist(), shares, strict=True):
            tensor = found.find(key)
            if tensor is None:
                raise RuntimeError("a tensor is not found")
            holders |= set(found.holders(tensor, *share))
        for holder in holders:
            found.container(holder)
        return holders

    seconds, holders = _seconds(look)
    return {
        "open": opened,
        "head_bytes": head,
        "seconds": seconds,
        "blocks": len(reads),
        "bytes": sum(reads),
        "containers": len(holders),
        "catalog_bytes": path.stat().st_size,
    }


def _open_manifest(folder: Path) -> Sample:
    seconds, _ = _seconds(lambda: manifest.open(Location(folder)))
    return {"seconds": seconds, "bytes": (folder / manifest.FILE).stat().st_size}


if __name__ == "__main__":
    _layout = Layout(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    answer(_coordinate(_layout, Path(sys.argv[4]) if len(sys.argv) > 4 else None))
