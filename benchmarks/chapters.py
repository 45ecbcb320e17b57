"""What the page says about each benchmark: how it is measured, and the columns of its table and picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tables import Benchmark, beside, column, ratios
from targets import MIB, Values, cpu_per_gb, draining, fetched, lost, scaled, times_as_fast


@dataclass(frozen=True)
class Column:
    """One column of a table: the same figure of every system.

    Attributes:
        title: The column's heading, with the unit.
        values: Takes a system's name; returns what computes its figure round by round.
        digits: The format of the figure.
        skip: Systems for which the figure means nothing.
    """

    title: str
    values: Callable[[str], Values]
    digits: str = ".2f"
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chapter:
    """One benchmark on the page.

    Attributes:
        title: The heading.
        how: How it is measured. Names in braces are replaced by the benchmark's parameters.
        columns: The columns of the table. The picture shows the first.
        alone: Whether it measures this package beside itself, and no peer.
    """

    title: str
    how: str
    columns: tuple[Column, ...]
    alone: bool = False


def _rate(figure: str) -> Callable[[str], Values]:
    def of(system: str) -> Values:
        def values(b: Benchmark) -> list[float]:
            return [b["parameters"]["bytes"] / seconds / 1e9 for seconds in scaled(system, figure)(b)]

        return values

    return of


def _seconds(figure: str = "seconds", factor: float = 1.0) -> Callable[[str], Values]:
    return lambda system: scaled(system, figure, factor)


def _of_raw(figure: str = "seconds") -> Callable[[str], Values]:
    return lambda system: times_as_fast(beside(system, "raw"), system, figure)


def _ours(figure: str = "seconds") -> Callable[[str], Values]:
    return lambda system: times_as_fast(system, beside(system, "datastates"), figure)


def _of_the_best(figure: str, best: str) -> Callable[[str], Values]:
    return lambda system: lambda b: ratios(column(b, system, figure), column(b, system, best))


_MOVED = (
    Column("GB/s", _rate("seconds")),
    Column("of raw", _of_raw()),
    Column("datastates is faster by ×", _ours()),
    Column("CPU s/GB", cpu_per_gb, skip=("raw",)),
)
_RESTORED = (
    "Every system saved once; each restore puts {bytes} bytes of tensors in place, after a few of them were set to "
    "zero, and these are compared afterwards. "
)
_TRAINED = (
    "{bytes} bytes of state, a checkpoint every {period} iterations. A period begins with the save; the loop goes on "
    "until the checkpoint is durable. Lost is what the period took beyond the median period without a checkpoint; "
    "throughput is that of the iterations between the first update and the moment of durability, over the plain "
    "loop's. A system's own gate surrounds each update; the host cache of datastates holds the whole state."
)
_TRAINING = (
    Column("loop time lost, s", lost, ".3f", skip=("plain",)),
    Column("save call, s", _seconds("call"), ".4f", skip=("plain",)),
    Column("until durable, GB/s", _rate("durable"), skip=("plain",)),
    Column("throughput while draining, ×", draining, ".3f", skip=("plain",)),
)
_STORED = (
    Column("write GB/s", _rate("write")),
    Column("restore GB/s", _rate("read")),
    Column("write, of raw", _of_raw("write")),
    Column("restore, of raw", _of_raw("read")),
)
_ONTO_GPU = (
    Column("GB/s", _rate("seconds")),
    Column("of raw", _of_raw()),
    Column("datastates is faster by ×", _ours()),
)
_LOADED = (
    "{tensors} bf16 tensors, {bytes} bytes in all, come from one file onto the GPU: into new tensors, and in one row "
    "into live ones. Each begins without memory of the device kept from a load before. Every element is compared "
    "afterwards. datastates verifies all checksums within the time; the others verify nothing. "
)
_RANKS = (
    *_STORED,
    Column("bytes read, of those needed", fetched, ".3f"),
    Column("loop time lost, s", lost, ".3f", skip=("plain",)),
    Column("save call, s", _seconds("call"), ".4f"),
    Column("durable while training, GB/s", _rate("durable")),
)
_RESHARDED = (
    "A GPT that FSDP2 shards by rows, with its AdamW, {bytes} bytes in all. N → M: N ranks have saved it, M other "
    "ones restore it in place, a process each, on one host; in columns: FSDP2 shards their matrices by columns. Before "
    "each, the files are put out of the page cache (checked with mincore). A restore begins when all ranks are there "
    "and ends when the last has its state. Every element is compared. Raw reads as many bytes with O_DIRECT by M "
    "processes at once, a file each. The raw restore, which is measured on the CPU machine, also takes a checksum of "
    "each 256 KiB and copies it to other memory. The bytes read are what storage read for all ranks together."
)
_RESHARDING = (
    Column("restore GB/s", _rate("read")),
    Column("restore, of raw", _of_raw("read")),
    Column("datastates is faster by ×", _ours("read")),
    Column("bytes read, of those needed", fetched, ".3f"),
)

CHAPTERS = {
    "write": Chapter(
        "Durable write",
        "A host state like an LLM's in training (bf16 weights, fp32 master weights and moments, thousands of small "
        "tensors, Python objects; {bytes} bytes of tensors) is saved until every file and directory is synced; the "
        "file is deleted before the next. Systems that do not sync get an fsync, inside the time. Raw is a C++ "
        "program that writes as many bytes to one file, fallocate and fsync included. CPU seconds are those of the "
        "process with io_uring's workers, but without the kernel threads that write dirty pages back. With pwrite is "
        "how datastates goes where io_uring is forbidden, as by the profile that containers have by default.",
        _MOVED,
    ),
    "restore-cold": Chapter(
        "Cold restore in place",
        _RESTORED
        + "Before each, the files are put out of the page cache, which is checked with mincore. Raw reads as many "
        "bytes with O_DIRECT. The raw restore is the same program with threads that take a checksum of each 256 KiB "
        "and copy it to other memory, and do nothing else: it bounds what any restore that verifies can reach.",
        _MOVED,
    ),
    "restore-first": Chapter(
        "The first restore of a process",
        "{bytes} bytes as above, restored in place by a process that has just started, as after a restart: a new "
        "process for each sample. It makes the state, sets a few tensors to zero, imports the system, and puts the "
        "files out of the page cache, which is checked with mincore. Then the time begins: the system is opened and "
        "restores. The few tensors are compared. The raw rows are those of cold restores.",
        _MOVED,
    ),
    "restore-warm": Chapter(
        "Warm restore in place",
        _RESTORED
        + "Before each, the files are read into the page cache. Raw reads as many bytes out of it, with threads.",
        _MOVED,
    ),
    "call": Chapter(
        "The snapshot() call",
        "How long `snapshot()` takes to return, for a state of the same structure as the one before: {few} and {many} "
        "fp32 tensors of {elements} elements, and a module with its Adam of about {few} tensors together. Between two "
        "calls the snapshot is committed, and all tensors are updated in place, as by a training step; in one line "
        "they are not, so that they come from memory and no longer from the processor's caches.",
        (Column("ms", _seconds(factor=1e3), ".3f"),),
        alone=True,
    ),
    "throughput": Chapter("Training throughput on the CPU while a checkpoint drains", _TRAINED, _TRAINING[::-1]),
    "memory": Chapter(
        "Host memory",
        "In a process of its own for each sample: the state of {bytes} bytes is made and the system imported, the "
        "kernel's record of the largest resident set is reset, the system saves three times, and the record less the "
        "resident set before is what it took. The host cache is {host_cache} bytes.",
        (Column("MiB above the process's own", _seconds("above", 1 / MIB), ".0f"),),
    ),
    "index": Chapter(
        "A million shards",
        "{shards} tensors in one file: planning its layout, encoding its index, opening and checking the index, and "
        "reading one tensor by its key after that.",
        (Column("ms", _seconds(factor=1e3), ".2f"),),
        alone=True,
    ),
    "capture": Chapter(
        "Capture from the GPU",
        "From the executor's call until the last byte has landed and was compared: one tensor of {bytes} bytes, one of "
        "{large} bytes, and {many} tensors of 4 KiB, beside torch's copy into page-locked memory in the same round, "
        "timed by CUDA events. Then the whole `snapshot()` call, and from its begin until `wait_captured()` returns.",
        (
            Column("ms", _seconds(factor=1e3), ".2f"),
            Column("call, ms", _seconds("call", 1e3), ".2f"),
            Column("call to captured, ms", _seconds("from_call", 1e3), ".2f"),
        ),
        alone=True,
    ),
    "training": Chapter("Training a GPT on the GPU", _TRAINED, _TRAINING),
    "durable": Chapter(
        "The GPU's state to the disk and back",
        "{bytes} bytes of model and optimizer on the GPU are saved until durable, put out of the page cache (checked "
        "with mincore), and restored onto the GPU in place, with a few tensors compared. Raw writes and reads as many "
        "bytes with O_DIRECT, from and to host memory.",
        _STORED,
    ),
    "durable-tmpfs": Chapter(
        "The GPU's state to tmpfs and back",
        "The same on tmpfs, a stand-in for storage faster than one thread. Raw is the best of several numbers of "
        "threads that copy as many bytes from and to host memory.",
        _STORED,
    ),
    "load-tmpfs": Chapter(
        "Weights from memory onto the GPU",
        _LOADED + "The files are on tmpfs. Raw copies as many bytes out of page-locked memory.",
        _ONTO_GPU,
    ),
    "load-cold": Chapter(
        "Weights from the disk onto the GPU",
        _LOADED + "The files are put out of the page cache before (checked with mincore). Raw reads as many bytes with "
        "O_DIRECT to host memory.",
        _ONTO_GPU,
    ),
    "ranks": Chapter(
        "Several ranks",
        "A GPT that FSDP2 shards, with its AdamW, {bytes} bytes in all; a process for each rank, on one host. N → M: N "
        "ranks save, M other ones restore. A write begins when all ranks are there and ends when the checkpoint is "
        "durable on the last. It is put out of the page cache (checked with mincore) and restored in place, and every "
        "element is compared. Raw writes as many bytes with O_DIRECT by N processes at once, a file each, and reads as "
        "many by M. While training, the save is followed by {period} iterations; lost is what they took together, on "
        "the slowest rank, beyond the median without a checkpoint.",
        _RANKS,
    ),
    "files": Chapter(
        "One rank restores many files",
        "{bytes} bytes of fp32 matrices: saved by one rank into one file, and by rows by {files} ranks into {files} "
        "files. One rank restores them in place. Before each, the files are put out of the page cache (checked with "
        "mincore). Every element is compared. Raw reads one file of as many bytes with O_DIRECT.",
        (
            Column("GB/s", _rate("seconds")),
            Column("of raw", _of_raw()),
            Column("bytes read, of those needed", fetched, ".3f"),
            Column("CPU s/GB", cpu_per_gb, skip=("raw",)),
        ),
        alone=True,
    ),
    "export": Chapter(
        "Export of weights",
        "A checkpoint of {tensors} fp32 matrices, {bytes} bytes, becomes files that other tools read: safetensors, if "
        "nothing else is said. Each system exports what it has saved itself, and datastates also the checkpoints of "
        "others. Before each, the source is put out of the page cache (checked with mincore). An export ends when all "
        "is on stable storage. Each runs in a process of its own. Memory is the largest resident set beyond the one "
        "before the export, mapped files included. Some tensors are compared afterwards. datastates compares all of "
        "them with their checksums within the time; the others verify nothing.",
        (*_MOVED, Column("peak memory, MiB", _seconds("above", 1 / MIB), ".0f")),
    ),
    "reshard": Chapter("Restoring what other ranks saved", _RESHARDED, _RESHARDING),
    "reshard-large": Chapter("Restoring what other ranks saved, large", _RESHARDED, _RESHARDING),
    "meshes": Chapter(
        "JAX's sharded trees",
        "A network with Adam in fp32, {bytes} bytes, sharded by rows over {devices} devices of one process, which are "
        "the CPU here. It is saved until durable. It is put out of the page cache (checked with mincore) and restored "
        "onto the same mesh, and again onto a mesh of 4 × 2 devices that cuts both dimensions. All values and "
        "shardings are compared. Lost is what {period} steps behind the begin of a save take beyond as many plain "
        "ones. Raw writes and reads as many bytes with O_DIRECT.",
        (
            Column("write GB/s", _rate("write")),
            Column("restore GB/s", _rate("read")),
            Column("restore onto another mesh GB/s", _rate("mesh")),
            Column("save call ms", _seconds("call", 1e3), ".1f", skip=("raw",)),
            Column("training lost ms", _seconds("lost", 1e3), ".0f", skip=("raw",)),
        ),
    ),
    "cadence": Chapter(
        "How often to save",
        "A snapshot of {bytes} bytes is measured, and a job simulated that saves so. It fails {failures} times at "
        "random moments, on average after the time in each row. Each failure costs {restart} s and all work since the "
        "last durable snapshot. The best interval is that of a scan by steps of 1 %, with the same failures. Waiting: "
        "the loop waits until each snapshot is durable.",
        (
            Column("chosen interval, of the best", _of_the_best("interval", "best"), ".3f"),
            Column("chosen interval, s", _seconds("interval"), ".1f"),
            Column("useful time, of the most", _of_the_best("useful", "most"), ".5f"),
            Column("useful time, of all", _seconds("useful"), ".4f"),
        ),
        alone=True,
    ),
}
