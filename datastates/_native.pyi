"""The native core: plans and pointers go in, bytes move, and no GIL is held while they do.

Sizes and offsets are bytes, times are seconds, checksums are CRC-32 as in ZIP. Arrays are one-dimensional,
C-contiguous NumPy arrays of exactly the dtype named; anything else raises ``NativeError`` with code "invalid".
Every object may be used from several threads. Every timeout is in seconds, None waits for ever; waits handle
signals, so Ctrl-C ends them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_U64 = npt.NDArray[np.uint64]
_U32 = npt.NDArray[np.uint32]
_I32 = npt.NDArray[np.int32]
_U8 = npt.NDArray[np.uint8] | npt.NDArray[np.bool_]

class NativeError(Exception):
    """Every error of the native core; ``args[0]`` is the message.

    Attributes:
        code: "io", "cuda", "corrupt", "torn", "invalid", "cancelled" or "closed".
        errno: The operating system's error number, 0 when there is none.
        op: The operation that failed: "open", "write", "sync", "cuMemcpyDtoHAsync", ...
        path: The file it failed on, or "".
        record: ``check_record`` of the first checksum that does not match, else -1.
    """

    code: str
    errno: int
    op: str
    path: str
    record: int

def crc32(data: Buffer, value: int = 0) -> int:
    """CRC-32 of ``data``, continued from ``value``."""

def crc32_combine(first: int, second: int, second_length: int) -> int:
    """CRC-32 of A followed by B, from theirs and B's length."""

def crc32_shift(raw: _U32, nbytes: _U64) -> bytes:
    """Raw CRC-32s after so many more zero bytes each, as little-endian u32.

    A raw CRC-32 begins at 0 and is not inverted at the end: it is linear in the data, and this shift in it. That of
    2**32 - 1 is the CRC-32 of so many zero bytes, inverted.
    """

def in_memory(path: str | bytes) -> bool:
    """Whether a file is memory and nothing else, as on tmpfs."""

class Digester:
    """Folds bytes, as they go by in order, into digests: exclusive ors of shifted raw CRC-32s."""

    def __init__(
        self, *, digests: int, offset: _U64, length: _U64, run_length: _U64, after: _U64, step: _U64, digest: _U32
    ) -> None:
        """Take stretches of runs, ascending by offset; see ``datastates.planning.plans.DigestRuns``."""

    def update(self, data: Buffer) -> None:
        """Go on with the next bytes; the first call's begin at offset 0."""

    def finish(self) -> bytes:
        """The digests of all that went by, as little-endian u32."""

def look(
    arrays: list[Any], memory_of: Callable[[Any], object] | None, plain: tuple[type, ...]
) -> tuple[bytes, bytes, bytes, list[object]] | None:
    """Look at each array once, and say: places, addresses of first elements, versions, memory.

    ``places`` is equal for two lists exactly when their arrays have, in order, the same types, addresses, devices,
    element types, shapes and strides. The others are 64-bit words, one an array: where the
    first elements are, torch's count of changes in place (-1 without one). ``memory`` is what ``memory_of`` gives
    for each, or empty without it. None when an array does not offer DLPack's C exchange API (torch does from 2.10 on),
    or is of none of the types in ``plain``, if that has any.
    """

def layout(arrays: list[Any]) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes] | None:
    """How each array is laid out: addresses, devices, elements, ndim, dims, strides.

    ``ndim`` is a byte an array; the others are 64-bit words: addresses of the first elements; devices and element types
    as words that are equal for equal ones; shapes and strides in elements, arrays end to end. None as for ``look``.
    """

def read_plain_pickle(
    opcodes: bytes,
    *,
    keys: list[str],
    kinds: tuple[str, ...],
    dtypes: tuple[str, ...],
    frames: Sequence[tuple[bytes, bytes, int, bool]],
    kind: _U8,
    dtype: _U8,
    record: _U32,
    record_nbytes: _U64,
    offset: _U64,
    ndim: _U8,
    dims: _U64,
    strides: _U64,
    reference: Callable[[str, str, str, tuple[int, ...], tuple[int, ...], bool, bool], object],
    ordered_dict: type,
) -> tuple[object] | None:
    """Read the opcodes of an object that holds only dicts, lists, tuples, plain values, and arrays of these rows.

    The arrays must be the rows in their order and written exactly as ``data.pkl`` is to hold them. For each row: its
    key; the numbers of its names in ``kinds`` and ``dtypes``; the number and the bytes of its storage record; its
    offset in bytes; its shape and strides in elements. ``frames`` says for each element type what stands before and
    behind an array's numbers, the element's bytes, and whether its storage counts elements.

    The value in a tuple, ``reference(key, kind, dtype, shape, stride, requires_grad, parameter)`` for each array; None
    when there is anything else in it: then it has to be read opcode by opcode. Imports nothing and calls nothing else.
    """

def arm_fault(point: str, action: str, value: int = 0, nth: int = 1, count: int = 0) -> None:
    """Break a syscall, for tests, in the whole process.

    Points: open, write, read, sync, truncate, allocate, statfs, uring_setup, uring_probe, uring_enter, cuda_alloc
    (memory that kernels are told by), cuda_register (page-locking the host cache), cuda_slab (the device cache),
    host_read (capturing host memory by process_vm_readv), capture (of an extent that is all lazy: put off while the
    point fails). Actions: "fail" with errno ``value``, "short" (about half the bytes), "eintr" (once), "kill" (SIGKILL
    to this process), "delay" (``value`` milliseconds). From the ``nth`` time the point is passed, ``count`` times, 0
    for ever.
    """

def clear_faults() -> None:
    """Disarm every fault point."""

def cuda_device_count() -> int:
    """How many CUDA devices the driver shows; 0 without a driver."""

class WritePlan:
    """What goes where in a container file; checked once, then used for any number of snapshots. Immutable."""

    def __init__(
        self,
        *,
        source_nbytes: _U64,
        chunk_bytes: int = 262144,
        literal: Buffer,
        extent_offset: _U64,
        extent_length: _U64,
        extent_piece: _U64,
        piece_source: _I32,
        piece_source_offset: _U64,
        piece_extent_offset: _U64,
        piece_length: _U64,
        patch_extent: _U64,
        patch_offset: _U64,
        patch_source: _I32,
        eager: _U8,
        digests: int,
        runs_source: _I32,
        runs_offset: _U64,
        runs_length: _U64,
        runs_run_length: _U64,
        runs_after: _U64,
        runs_step: _U64,
        runs_digest: _U32,
    ) -> None:
        """Take the planner's arrays; the literal is copied.

        Extents tile the file from 0, their lengths are multiples of 4096 (the last one's need not be), and their
        pieces tile them. ``piece_source`` -1 is the literal. A source is cut at multiples of 8 and lies in the file
        in order; eager sources come before lazy ones. A patch writes its source's CRC-32, little-endian, into an
        extent not before the source's last. Runs come by source, then by offset; see
        ``datastates.planning.plans.DigestRuns``.
        """

class ReadPlan:
    """What to read from a container file, where it goes, and the checksums it must have. Immutable."""

    def __init__(
        self,
        *,
        dest_nbytes: _U64,
        extent_offset: _U64,
        extent_length: _U64,
        extent_span: _U64,
        span_offset: _U64,
        span_length: _U64,
        extent_piece: _U64,
        piece_dest: _I32,
        piece_dest_offset: _U64,
        piece_extent_offset: _U64,
        piece_length: _U64,
        extent_check: _U64,
        check_offset: _U64,
        check_length: _U64,
        check_crc: _U32,
        check_record: _I32,
    ) -> None:
        """Take the planner's arrays. Extents ascend and are at most ``block_bytes - 8192`` long.

        Spans begin and end with their extent and lie apart; of an extent of several nothing else is read. Pieces and
        checks lie in a span each.
        """

class Executor:
    """The host cache, the threads and the rings. Jobs keep it alive."""

    @property
    def backend(self) -> str:
        """What moves the bytes: "io_uring" or "pwrite"."""

    @property
    def cache_bytes(self) -> int:
        """The most that the host cache may grow to: as many whole blocks as fit what was asked for."""

    @property
    def block_bytes(self) -> int:
        """The unit that the cache is cut into."""

    @property
    def pinned(self) -> bool:
        """Whether the host cache, as far as it has grown, is page-locked for CUDA.

        It is from the first device on, soon after, in the background. Where the system refuses (a limit on locked
        memory), everything works all the same, slower.
        """

    def __init__(
        self,
        *,
        cache_bytes: int,
        block_bytes: int,
        queue_depth: int,
        backend: str,
        direct: bool,
        io_threads: int,
        device_cache_bytes: int = 0,
    ) -> None:
        """Start the threads; the cache grows to what jobs need.

        Args:
            cache_bytes: Host memory for data on its way, at most.
            block_bytes: The unit it is cut into, a multiple of 4096; no extent is longer.
            queue_depth: Reads in flight at a time; of writes twice as many.
            backend: "auto" (io_uring where the system allows it), "io_uring" or "pwrite".
            direct: Use O_DIRECT where the file system allows it.
            io_threads: Threads of the pwrite backend.
            device_cache_bytes: Spare memory of each device that a gate may copy to what is not on its way to the
                host yet, at most; 0 for none. No more is taken than is free beyond a margin.
        """

    def reserve(self, nbytes: int) -> None:
        """Back so much of the host cache with memory beforehand, in the background."""

    def prepare_device(self, device: int) -> None:
        """Make a CUDA device known before its first job, so that what is reserved is page-locked for it."""

    def submit_write(
        self, path: str | bytes, plan: WritePlan, ptr: _U64, device: _I32, stream: _U64, witness: _U8
    ) -> WriteJob:
        """Capture the eager sources, and return; ``path``, which must not exist, is made meanwhile.

        Where it cannot be made, the job fails. Waits for cache blocks while capturing. Sources' memory must stay alive
        until captured or aborted, and lazy sources unchanged. ``device`` is a CUDA ordinal or -1 for host memory;
        ``stream`` the CUstream that produces a device source, 0 for the legacy default stream; ``witness`` asks for a
        fingerprint, see ``torn``. Where it raises, it leaves no file.
        """

    def submit_read(
        self, path: str | bytes, plan: ReadPlan, ptr: _U64, device: _I32, stream: _U64, ahead: ReadAhead | None = None
    ) -> ReadJob:
        """Start reading into ``ptr``. Destinations must stay alive until the job is done or destroyed.

        Copies to a device come after what is on the destination's ``stream`` now. ``ahead`` is ended: those of its
        extents that are the same in the plan are not read again, all others are dropped.
        """

    def read_ahead(self, path: str | bytes, plan: ReadPlan) -> ReadAhead:
        """Begin to read a plan's extents in order, as far as there are blocks at once; the plan has no destinations.

        Nothing is read where another such read is open. What is in memory already is left out. What fails is found
        when it is read again. Raises ``NativeError`` "invalid" for more extents than half of the cache has blocks.
        """

    def close(self) -> None:
        """Refuse new jobs and wait until the running ones are written or failed. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: never wait for the parent's threads again, also not when objects are destroyed."""

class WriteJob:
    """One container being captured and written. Destroying it before ``finish`` aborts it."""

    @property
    def captured(self) -> bool:
        """Whether all sources are copied off their memory."""

    @property
    def written(self) -> bool:
        """Whether all extents are written, though not synced."""

    @property
    def made(self) -> bool:
        """Whether it has made its file."""

    def wait_made(self, timeout: float | None = None) -> bool:
        """Wait until its file exists; False when the timeout passed. Raises what failed."""

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Wait until all sources are copied off their memory; False when the timeout passed. Raises what failed."""

    def wait_checksummed(self, timeout: float | None = None) -> bool:
        """Wait until all checksums and digests are known, which is before the last extents are written.

        False when the timeout passed. Raises what failed.
        """

    def gate(self, streams: Sequence[tuple[int, int]], timeout: float | None = None) -> bool:
        """Return once later work on ``streams``, as (device, stream handle), may change the sources.

        Waits until every host source is copied and every device copy is enqueued, and makes each stream wait for
        the copies of its device. True, without raising, for a failed job too: nothing more is read then. A host
        source's memory must stay alive until captured; so must a device source's, gate or not.
        """

    def torn(self) -> list[int]:
        """Sources whose fingerprint changed between submit and capture. Valid once captured."""

    def checksums(self) -> tuple[bytes, bytes]:
        """CRC-32 of each source, and of each chunk of each source end to end, as little-endian u32.

        Raises ``NativeError`` "invalid" before they are known.
        """

    def digests(self) -> bytes:
        """What the plan's runs come to, as little-endian u32. Raises ``NativeError`` "invalid" too early."""

    def finish(self, tail: Buffer) -> None:
        """Wait until written, append ``tail`` to the last extent's bytes, cut to length, fsync, close. Blocking.

        Raises what the job failed with, "cancelled" after ``abort``, "closed" after an earlier ``finish``.
        """

    def abort(self) -> None:
        """Stop; returns when no memory of the caller's is touched any more and the file is closed. Idempotent."""

    def stats(self) -> dict[str, Any]:
        """What was done so far.

        Keys: bytes, extents, capture_seconds (submit to captured), direct, backend ("memory" for a file that lives
        in memory), pinned (whether the host cache is page-locked), device_cache_bytes (copied to spare device memory
        at a gate), evacuate_seconds (enqueueing those copies), dropped_spans (that ``timeline`` had no room for).
        """

    def timeline(self) -> list[tuple[str, int, float, float, int]]:
        """What ran when, as (stage, track, begin, end, bytes) on the clock of ``time.monotonic``.

        Stages: submit (submit_write), create (the file), capture, cache_wait (for a free block), checksum (of device
        sources), write (one extent), tail, sync. Spans of one stage and track do not overlap, unless it is cache_wait.
        Bounded: a job of more than 200,000 spans keeps the first ones.
        """

class ReadAhead:
    """A part of a file being read before it is known where it goes."""

    @property
    def bytes_read(self) -> int:
        """So far, with alignment; 0 once a job has taken over, which counts them."""

    def wait(self) -> None:
        """Wait until nothing is read any more."""

    def close(self) -> None:
        """Drop what no job has taken; waits until nothing is read any more. Idempotent."""

class ReadJob:
    """One container being read into place. Destroying it stops it and waits."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is read, verified and in place; False when the timeout passed.

        Raises ``NativeError``: "corrupt" with ``record`` for the first bad checksum in the file, or for a file that
        ends early; "io"; "cuda". Destinations may have been overwritten by then.
        """

    def stats(self) -> dict[str, Any]:
        """What was done, once done.

        Keys: bytes_needed (of the plan's spans), bytes_read (with alignment), in_place_bytes (read straight into
        destinations), cached_bytes (needed ones that were in the page cache or in memory), seconds, direct, backend,
        dropped_spans.
        """

    def timeline(self) -> list[tuple[str, int, float, float, int]]:
        """Like ``WriteJob.timeline``, without what was read ahead.

        Stages: read (one extent), verify, copy (from a block to its destinations).
        """
