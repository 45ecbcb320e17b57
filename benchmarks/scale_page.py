"""The page about scale. Every figure on it comes from ``scale.json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from commit_model import pauses
from datastates.ranks.polling import slowest
from tables import Benchmark, column, markdown, spread

_WIDE = 0.3
"""A range wider than this part of the median is shown."""
_PAGE = """# Scale

What a commit and an open cost at {ranks:,} ranks with {tensors:,} shards each. Made by `make bench-scale` from
[`scale.json`](benchmarks/scale.json), which holds every sample. Figures are medians, with the range where it is wider
than {wide:.0f} % of the median.

{trial}{machine} Load of the machine when each part was begun, and its rounds: {loads}.

Measured there: CPU seconds of the project's own code for one rank, for the coordinator (rank 0) with the votes of all
ranks, and for a rank that restores, and the throughput of torch's Store over the loopback. **Nobody ran {ranks:,}
processes:** a commit's time is simulated out of these figures. The network and the shared file system are assumptions,
named below.

Layouts, bf16, each rank with {tensors:,} shards, whose claims are made in columns:

- FSDP: {tensors:,} tensors, each split by rows over all ranks;
- own keys: each rank has tensors that no other has, as stages of a pipeline and experts have; hashes of keys are drawn;
- ZeRO: {tensors:,} tensors, each flattened and split into as many ranges as there are ranks, the last one shorter.

## Each rank

{rank}

Claims are made once for a structure, the vote and the index for every snapshot. None of it depends on how many ranks
there are. `token` asks nobody, once the run's name is known.

## The Store

{agreement}

Counted in one `agree` with threads as ranks. A rank's calls do not grow with the ranks. The coordinator's are one
question about all keys, one `multi_get` for every 64 votes, the gate, the answer and its mark. Looks are left out: a
rank asks again for the answer, at first after 1 ms, then ever more seldom down to every {interval:.2g} s at
{ranks:,} ranks.

{store}

One server process, its clients threads of another, {vote} bytes a vote. A server that is reached through {ranks:,}
connections may do worse: that was not measured.

## The coordinator

{coordinator}

`decode` is of all votes, `cover` the check that parts tile tensors, `manifest` the making and encoding of
`manifest.json`. Memory is what the resident set grew by at most: the votes as they came, decoded, and all that is made
of them. The Store's server, most often in the same process, holds the votes once more.

## A rank that restores

{restore}

For all {tensors:,} tensors of one rank: `find`, `holders`, and the identity of each container that is to be opened. A
block is {block:,} bytes, and one read; files were in the page cache.

`manifest.json` grows with the ranks and is parsed as a whole: {manifest_bytes:,.0f} bytes in {manifest_ms:.0f} ms. The
coordinator alone reads it; all ranks would read {manifest_total:.1f} GB together. The Store tells the others what they
need of it, some {needed} bytes.

## A commit in simulated time

`benchmarks/commit_model.py` follows the messages of one `agree`. Ranks persist at moments spread evenly over
{skew:g} s; times count from the last one. Each call takes the latency of its row there and back.

- Measured: the server is busy {request:.0f} µs a request and {key:.2f} µs for each key of a question about many; the
  coordinator's CPU seconds, for FSDP.
- Assumed: the server's 1 GB/s; {metadata:.1f} ms to ask the file system for a container's length, {at_once} at a time;
  {storage:g} GB/s to write catalog and manifest.
- Left out: what the coordinator's own process takes to receive votes. The last table has it at the measured rate.

{commit}

`heard`: the coordinator has all votes in memory. `decided` is what it then takes. `committed`: the checkpoint stands.
`last knows`: every rank has been told.

## Limits

What ends first, as ranks grow, and what to do then:

| what | today | at {ranks:,} ranks | what to do |
| --- | --- | --- | --- |
{limits}

Two costs grow with the ranks whatever is done here, on rank 0 and its Store only: one vote and one mark for each rank,
and one entry for each in the manifest.
"""


def page(report: dict[str, Any], machine: str) -> str:
    """The text of the page. ``machine`` is the line about the machine."""
    benchmarks: dict[str, Benchmark] = report["benchmarks"]
    if missing := {"rank", "agreement", "store", "coordinator", "restore", "commit"} - set(benchmarks):
        raise ValueError(f"scale.json lacks {', '.join(sorted(missing))}")
    rank, store, restore, commit = (benchmarks[n] for n in ("rank", "store", "restore", "commit"))
    model = commit["parameters"]
    ranks, tensors = rank["parameters"]["ranks"], rank["parameters"]["tensors"]
    manifest_bytes = _median(restore, "manifest.json", "bytes")
    return _PAGE.format(
        ranks=ranks,
        tensors=tensors,
        trial="**A trial with few ranks: its figures mean nothing.**\n\n" if report["tiny"] else "",
        machine=machine,
        loads=", ".join(_circumstances(name, b) for name, b in benchmarks.items()),
        rank=_table(rank, _RANK),
        agreement=_table(benchmarks["agreement"], _AGREEMENT),
        interval=slowest(ranks),
        wide=100 * _WIDE,
        store=_store(store),
        vote=f"{store['parameters']['vote']:,}",
        coordinator=_table(benchmarks["coordinator"], _COORDINATOR),
        restore=_table(restore, _RESTORE, skip=("manifest.json",)),
        block=restore["parameters"]["block"],
        manifest_bytes=manifest_bytes,
        manifest_ms=_median(restore, "manifest.json", "seconds") * 1e3,
        manifest_total=manifest_bytes * ranks / 1e9,
        needed=restore["parameters"]["needed"],
        skew=model["skew"],
        request=model["request"] * 1e6,
        key=model["key"] * 1e6,
        metadata=model["metadata"] * 1e3,
        storage=model["storage"] / 1e9,
        at_once=model["at_once"],
        commit=_table(commit, _COMMIT),
        limits="\n".join(" ".join(("|", " | ".join(row), "|")) for row in _limits(benchmarks, ranks)),
    )


def _circumstances(name: str, benchmark: Benchmark) -> str:
    rounds = max(map(len, benchmark["samples"].values()), default=0)
    return f"{name} {benchmark['parameters']['load']:.1f}, {rounds}×"


def _median(benchmark: Benchmark, system: str, figure: str) -> float:
    return statistics.median(column(benchmark, system, figure))


_Figure = tuple[str, Callable[[dict[str, float]], float], str]


def _of(figure: str, factor: float = 1.0) -> Callable[[dict[str, float]], float]:
    return lambda sample: sample[figure] * factor


_RANK: tuple[_Figure, ...] = (
    ("claims_of, ms", _of("claims", 1e3), ".1f"),
    ("vote, ms", _of("vote", 1e3), ".2f"),
    ("vote, bytes", _of("vote_bytes"), ",.0f"),
    ("tail with index, ms", _of("index", 1e3), ".2f"),
    ("tail with index, bytes", _of("index_bytes"), ",.0f"),
    ("token, µs", _of("token", 1e6), ".1f"),
)
_AGREEMENT: tuple[_Figure, ...] = (
    ("calls of a rank, least", _of("rank_calls_least"), ".0f"),
    ("most", _of("rank_calls"), ".0f"),
    ("calls of the coordinator", _of("coordinator_calls"), ".0f"),
)
_COORDINATOR: tuple[_Figure, ...] = (
    ("decode, s", _of("decode"), ".3f"),
    ("cover, ms", _of("cover", 1e3), ".2f"),
    ("catalog, s", _of("catalog"), ".3f"),
    ("catalog, MB", _of("catalog_bytes", 1e-6), ".1f"),
    ("manifest, ms", _of("manifest", 1e3), ".1f"),
    ("memory, MiB", _of("memory", 2**-20), ",.0f"),
)
_RESTORE: tuple[_Figure, ...] = (
    ("head, kB", _of("head_bytes", 1e-3), ".1f"),
    ("open, ms", _of("open", 1e3), ".2f"),
    ("look-ups, ms", _of("seconds", 1e3), ".1f"),
    ("MB read", _of("bytes", 1e-6), ".1f"),
    ("containers", _of("containers"), ",.0f"),
)
_COMMIT: tuple[_Figure, ...] = (
    ("heard, s", _of("heard"), ".2f"),
    ("decided, s", _of("decide"), ".2f"),
    ("committed, s", _of("committed"), ".2f"),
    ("last knows, s", _of("last"), ".2f"),
    ("requests", _of("requests"), ",.0f"),
    ("server busy, s", _of("busy"), ".2f"),
)


def _table(benchmark: Benchmark, figures: Sequence[_Figure], skip: Sequence[str] = ()) -> str:
    """A table with a line for each system, and one for each system that failed."""
    rows = [
        [name, *(_cell([value(sample) for sample in samples], digits) for _, value, digits in figures)]
        for name, samples in benchmark["samples"].items()
        if name not in skip
    ]
    rows += [[name, f"failed: {error}", *[""] * (len(figures) - 1)] for name, error in benchmark["errors"].items()]
    return markdown(("", *(title for title, _, _ in figures)), rows)


def _cell(values: list[float], digits: str) -> str:
    shown, middle = spread(values, digits), f"{statistics.median(values):{digits}}"
    wide = max(values) - min(values) > _WIDE * statistics.median(values)
    return shown if wide and shown != f"{middle} ({middle}–{middle})" else middle


def _store(store: Benchmark) -> str:
    lines = (
        ("votes left (set, add)", "votes", "in_bytes_per_s", 1e-6, "MB/s"),
        ("votes left, the server's CPU", "votes", "in_cpu_seconds", 1e6 / store["parameters"]["votes"], "µs a vote"),
        ("votes read by the coordinator", "votes", "out_bytes_per_s", 1e-6, "MB/s"),
        ("votes read, the server's CPU", "votes", "out_cpu_seconds", 1e6 / store["parameters"]["votes"], "µs a vote"),
        ("looks of one client", "looks of one client", "requests_per_s", 1e-3, "thousand/s"),
        ("looks of 8 clients", "looks of 8 clients", "requests_per_s", 1e-3, "thousand/s"),
        ("looks of 8 clients, the server's CPU", "looks of 8 clients", "request_seconds", 1e6, "µs a request"),
        (
            "a question about many keys, the server's CPU",
            "one question about many keys",
            "key_seconds",
            1e6,
            "µs a key",
        ),
    )
    rows = [
        [what, _cell([v * factor for v in column(store, system, figure)], ".1f") + " " + unit]
        for what, system, figure, factor, unit in lines
    ]
    return markdown(("", "of one server"), rows)


def _limits(benchmarks: dict[str, Benchmark], ranks: int) -> list[list[str]]:
    store, restore, commit = benchmarks["store"], benchmarks["restore"], benchmarks["commit"]
    fsdp = f"FSDP, {ranks:,} ranks"
    coordinator, model = benchmarks["coordinator"], commit["parameters"]
    votes = _median(coordinator, fsdp, "vote_bytes")
    rate = 1 / _median(store, "looks of 8 clients", "request_seconds")
    read = _median(store, "votes", "out_bytes_per_s")
    memory = max(
        _median(coordinator, name, "memory") for name in coordinator["samples"] if name.endswith(f", {ranks:,} ranks")
    )
    longest = slowest(ranks)
    early = next(i for i, pause in enumerate(pauses(ranks)) if pause >= longest)
    manifest = _median(restore, "manifest.json", "bytes")
    return [
        [
            "open files at the Store's server",
            "two connections for each rank, torch's and ours",
            f"{2 * ranks:,}; a limit of 1,024 ends at 512 ranks, one of 65,536 at 32,768",
            "raise rank 0's limit or the launcher's; one connection for each host",
        ],
        [
            "requests when all begin to wait",
            f"{early} looks of each rank before its pause is {longest:.2g} s",
            f"{early * ranks:,} looks, {early * ranks / rate:.1f} s of the server's at {rate / 1e3:.0f} thousand/s",
            "let one rank of each host look",
        ],
        [
            "asking for each container's length",
            f"{model['at_once']} at a time, {model['metadata'] * 1e3:.1f} ms each (assumed)",
            f"{ranks * model['metadata'] / model['at_once']:.2f} s",
            "ask for more at a time",
        ],
        [
            "votes through one server",
            f"{votes / ranks:,.0f} bytes a rank",
            f"{votes / 1e6:.0f} MB, {votes / read:.1f} s to read at the measured {read / 1e6:.0f} MB/s",
            "read votes while others are awaited; tell only a hash and digests of a known structure",
        ],
        [
            "memory of the coordinator",
            f"up to {memory / votes:.1f} times the votes",
            f"{memory / 2**30:.1f} GiB; 16 GiB at {int(ranks * 16 * 2**30 / memory):,} ranks",
            "decode votes in place; one coordinator for each group of ranks",
        ],
        [
            "`manifest.json`, read by the coordinator",
            f"{manifest / ranks:.0f} bytes a rank",
            f"{manifest / 1e6:.1f} MB",
            "leave the containers to the catalog",
        ],
        [
            "head of the catalog",
            f"4 bytes for each {restore['parameters']['block']:,}",
            f"{_median(restore, 'FSDP, as saved', 'head_bytes') / 1e3:.0f} kB for every rank that restores",
            "a second level of checksums",
        ],
        [
            "tensors split by columns over all ranks",
            "every rank is a holder",
            f"{ranks:,} containers to open",
            "split by rows first, as two-dimensional meshes do",
        ],
    ]
