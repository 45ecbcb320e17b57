"""What the page says about each benchmark: its figures, and how they are measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tables import Benchmark, beside, column, ratios

Values = Callable[[Benchmark, str], list[float]]
"""Computes one figure of a row of the samples, such as ``DCP, 2 → 1``, round by round; empty without samples of it."""


@dataclass(frozen=True)
class Figure:
    """One figure of every system.

    Attributes:
        title: What it is, with the unit.
        values: Computes it.
    """

    title: str
    values: Values


@dataclass(frozen=True)
class Chapter:
    """One benchmark on the page.

    Attributes:
        title: Its name.
        of: What it was measured with. Names in braces are replaced by the benchmark's parameters.
        how: How it is measured. Chapters that are measured alike have the same text.
        figures: A row of the table each.
        layouts: Whether names of systems end in how many ranks there are, and each of these has rows of its own.
        alone: Whether it measures this package in several circumstances, and no peer.
    """

    title: str
    of: str
    how: str
    figures: tuple[Figure, ...]
    layouts: bool = False
    alone: bool = False


def _times(figure: str, factor: float = 1.0) -> Values:
    return lambda b, row: [value * factor for value in column(b, row, figure)]


def _rate(figure: str) -> Values:
    return lambda b, row: [b["parameters"]["bytes"] / seconds / 1e9 for seconds in column(b, row, figure)]


def _cpu_per_gb(b: Benchmark, row: str) -> list[float]:
    return [value / b["parameters"]["bytes"] * 1e9 for value in column(b, row, "cpu_seconds") if row != "raw"]


def _lost(b: Benchmark, row: str) -> list[float]:
    """Seconds by which the period with a checkpoint is longer than the median plain one."""
    plain = column(b, beside(row, "plain"), "seconds")
    return [value - statistics.median(plain) for value in column(b, row, "seconds")] if plain else []


def _draining(b: Benchmark, row: str) -> list[float]:
    """Iterations a second while a checkpoint drains, over those of the plain loop."""
    plain = column(b, "plain", "seconds")
    iteration = statistics.median(plain) / b["parameters"]["period"] if plain else 0.0
    return [iteration / value for value in column(b, row, "draining")] if plain else []


def _of_the_best(figure: str, best: str) -> Values:
    return lambda b, row: ratios(column(b, row, figure), column(b, row, best))


_RATE = Figure("GB/s", _rate("seconds"))
_MOVED = (_RATE, Figure("CPU s/GB", _cpu_per_gb))
_WRITE, _RESTORE = Figure("write, GB/s", _rate("write")), Figure("restore, GB/s", _rate("read"))
_LOST, _CALL = Figure("training lost, s", _lost), Figure("save call, ms", _times("call", 1e3))
_READ = Figure("GB/s", _rate("read"))
_MS = Figure("ms", _times("seconds", 1e3))
_ABOVE = Figure("memory, MB", _times("above", 1e-6))
_TRAINED = (
    "*Lost* is what a save and the iterations behind it take beyond the median of as many iterations without a save. "
    "Throughput is that of the iterations until the checkpoint is durable, over the plain loop's. The host cache of "
    "datastates holds the whole state."
)
_TRAINING = (
    _LOST,
    _CALL,
    Figure("until durable, GB/s", _rate("durable")),
    Figure("throughput while draining, ×", _draining),
)
_LOADED = (
    "bf16 tensors of one file become new tensors, or *in place* live ones. Every element is compared. datastates "
    "verifies all checksums within the time; the others verify nothing. *From memory* is from tmpfs, and raw copies "
    "page-locked memory. *From the disk* is from a cold page cache, and raw reads to host memory."
)
_RESHARDED = "The restores among several ranks, again. *In columns*: those that restore shard matrices by columns."

CHAPTERS = {
    "training": Chapter("Training a GPT on the GPU", "{bytes}, {period} iterations", _TRAINED, _TRAINING),
    "durable": Chapter(
        "The GPU's state to the disk and back",
        "{bytes}",
        "Model and optimizer are saved until durable, and restored in place from a cold page cache. Raw writes from "
        "host memory and reads to it.",
        (_WRITE, _RESTORE),
    ),
    "durable-tmpfs": Chapter(
        "The GPU's state to tmpfs and back",
        "{bytes}",
        "The same on tmpfs, a stand-in for storage faster than one thread. Raw copies with the best number of threads.",
        (_WRITE, _RESTORE),
    ),
    "load-tmpfs": Chapter("Weights from memory onto the GPU", "{bytes}, {tensors} tensors", _LOADED, (_RATE,)),
    "load-cold": Chapter("Weights from the disk onto the GPU", "{bytes}, {tensors} tensors", _LOADED, (_RATE,)),
    "capture": Chapter(
        "Capture from the GPU",
        "{bytes}, large {large}, {many} small tensors",
        "From the executor's call until the last byte has landed, beside torch's copy into page-locked memory. Then "
        "the `snapshot()` call, and from its begin until `wait_captured()` returns.",
        (_MS, _CALL, Figure("call to captured, ms", _times("from_call", 1e3))),
        alone=True,
    ),
    "write": Chapter(
        "Durable write",
        "{bytes}",
        "A host state like an LLM's in training (thousands of tensors, and Python objects) is saved until every file "
        "and directory is synced; systems that do not sync get an fsync within the time. CPU seconds are those of the "
        "process, io_uring's workers included. *With pwrite* is for where io_uring is forbidden, as in many "
        "containers.",
        _MOVED,
    ),
    "restore-cold": Chapter(
        "Cold restore in place",
        "{bytes}",
        "Tensors that were set to zero before are compared afterwards. *Raw restore* also takes checksums and copies: "
        "it bounds any restore that verifies.",
        (_RATE,),
    ),
    "restore-first": Chapter(
        "First restore of a process",
        "{bytes}",
        "The same by a process that has just started and imported the system.",
        (_RATE,),
    ),
    "restore-warm": Chapter(
        "Warm restore in place",
        "{bytes}",
        "The same with the files in the page cache.",
        (_RATE,),
    ),
    "call": Chapter(
        "The snapshot() call",
        "{few} or {many} tensors",
        "For small tensors, or a module and its Adam of about *few* tensors, in the same structure as before. All are "
        "updated in place before each call, but *untouched* ones, which come from memory and no longer from caches.",
        (_MS,),
        alone=True,
    ),
    "throughput": Chapter("Training on the CPU", "{bytes}, {period} iterations", _TRAINED, _TRAINING),
    "memory": Chapter(
        "Host memory",
        "{bytes}, host cache {host_cache}",
        "The largest resident set of a new process during three saves, less the one before them.",
        (_ABOVE,),
    ),
    "index": Chapter(
        "An index",
        "{shards} tensors",
        "Planning a file's layout, encoding its index, opening and checking that, and reading a tensor by its key.",
        (_MS,),
        alone=True,
    ),
    "ranks": Chapter(
        "Several ranks",
        "{bytes}, {period} iterations",
        "A GPT that FSDP2 shards, with its AdamW; a process for each rank, on one host. N→M: N ranks save, and M "
        "others restore in place. A write ends when the checkpoint is durable on the last rank. Every element is "
        "compared. Raw has a process and a file for each rank. *Lost* is that of the slowest rank.",
        (_WRITE, _RESTORE, _LOST),
        layouts=True,
    ),
    "fsdp2-loop": Chapter(
        "An FSDP2 loop",
        "{bytes}, {period} iterations",
        "A GPT that FSDP2 shards over all GPUs, with its AdamW. *Lost* is what a period that begins with a save takes "
        "beyond the median plain one, on the slowest rank. Garbage is collected between the periods only. The host "
        "cache of datastates holds the whole state. An all-reduce is of 256 MiB, the mean of 60.",
        (
            _LOST,
            _CALL,
            Figure("until durable, GB/s", _rate("durable")),
            Figure("first forward, ms", _times("first forward", 1e3)),
            Figure("first backward, ms", _times("first backward", 1e3)),
            Figure("first step, ms", _times("first step", 1e3)),
            Figure("all-reduce, ms", _times("all-reduce", 1e3)),
        ),
    ),
    "reshard": Chapter("What other ranks saved", "{bytes}", _RESHARDED, (_READ,), layouts=True),
    "reshard-large": Chapter("What other ranks saved, large", "{bytes}", _RESHARDED, (_READ,), layouts=True),
    "files": Chapter(
        "One rank restores many files",
        "{bytes}",
        "Matrices that one rank saved into one file, or many ranks by rows, are restored from a cold page cache.",
        (_RATE,),
        alone=True,
    ),
    "export": Chapter(
        "Export of weights",
        "{bytes}, {tensors} tensors",
        "A checkpoint in a cold page cache becomes files for other tools, safetensors if nothing else is said, on "
        "stable storage. datastates verifies all checksums within the time; the others verify nothing. Memory is the "
        "largest resident set of the process, mapped files included, less the one before.",
        (*_MOVED, _ABOVE),
    ),
    "buckets": Chapter(
        "A bucket",
        "{bytes}",
        "A host state like an LLM's in training is saved to a server of the S3 protocol on the same machine, until it "
        "is durable, and restored in place. Tensors that were set to zero before are compared afterwards. Raw is "
        "obstore's own upload of parts of 8 MiB, and 32 threads that ask it for such pieces and copy them into memory. "
        "CPU seconds are those of the client.",
        (
            Figure("save, GB/s", _rate("put")),
            Figure("save, CPU s", _times("put_cpu")),
            Figure("restore, GB/s", _rate("get")),
            Figure("restore, CPU s", _times("get_cpu")),
        ),
    ),
    "drains": Chapter(
        "From a disk to a bucket",
        "{bytes}",
        "A checkpoint that lies in the page cache is brought to a server of the S3 protocol on the same machine, until "
        "it is committed there. Raw is obstore's own upload of as many bytes from memory. *Loop*: products of matrices "
        "on another thread meanwhile.",
        (
            Figure("GB/s", _rate("seconds")),
            Figure("CPU s", _times("cpu")),
            Figure("loop, steps a second", _times("steps")),
        ),
    ),
    "copies-tmpfs": Chapter(
        "From one host to another",
        "{bytes}",
        "A container in memory is brought to another process on the same machine, and written there. Raw is as many "
        "bytes through gloo alone. CPU seconds are those of both processes.",
        (Figure("GB/s", _rate("seconds")), Figure("CPU s", _times("cpu"))),
    ),
    "meshes": Chapter(
        "JAX's sharded trees",
        "{bytes}, {devices} devices",
        "A network with its Adam, sharded by rows over devices of one process, which are the CPU. It is restored from "
        "a cold page cache onto the same mesh, or one that cuts both dimensions. All values are compared.",
        (
            _WRITE,
            _RESTORE,
            Figure("onto another mesh, GB/s", _rate("mesh")),
            Figure("training lost, s", _times("lost")),
            _CALL,
        ),
    ),
    "lora": Chapter(
        "LoRA over a frozen base",
        "{bytes}, of which {changing} change",
        "A save, and at once an iteration that changes adapters and moments. *Waits* is what both take beyond an "
        "iteration alone; a longer forward and backward would hide a wait at the gate. *Fuller* is the file system, "
        "after all is synced; *written* is what datastates reports. *Incremental* shares ranges of files, "
        "here on XFS. Orbax gets NumPy's arrays. Memory is the largest resident set of a process "
        "of its own during three saves, less the one before them; one process each.",
        (
            Figure("written, MB", _times("written", 1e-6)),
            Figure("file system fuller by, MB", _times("used", 1e-6)),
            Figure("until durable, s", _times("durable")),
            Figure("training waits, s", _times("waits")),
            _ABOVE,
        ),
    ),
    "cadence": Chapter(
        "How often to save",
        "{bytes}, {failures} failures",
        "A snapshot is measured, and a job simulated that saves at the chosen interval and fails on average after the "
        "time given. A scan with the same failures finds the best interval. *Waiting*: until each snapshot is "
        "durable.",
        (
            Figure("chosen interval, of the best", _of_the_best("interval", "best")),
            Figure("useful time, of the most", _of_the_best("useful", "most")),
        ),
        alone=True,
    ),
}
