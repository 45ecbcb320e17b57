"""The native core. It takes plans and pointers, and moves bytes without holding the GIL.

Sizes and offsets are in bytes, times in seconds, checksums are CRC-32 as in ZIP. Arrays are one-dimensional,
C-contiguous NumPy arrays of exactly the named dtype; any other array raises DatastatesError. Every object is
thread-safe. A timeout is in seconds; None waits without limit. Waits with a timeout argument, and ``WriteJob.finish``
while it waits, handle signals, so Ctrl-C ends them.

Errors are those of ``datastates.errors``: StorageError of the operating system, DeviceError of CUDA, FormatError for a
file that ends early, ClosedError for what was closed or aborted, and DatastatesError for arguments and plans that
contradict themselves.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_U64 = npt.NDArray[np.uint64]
_U32 = npt.NDArray[np.uint32]
_I32 = npt.NDArray[np.int32]
_U8 = npt.NDArray[np.uint8] | npt.NDArray[np.bool_]

_Spans = tuple[npt.NDArray[np.uint8], _U32, npt.NDArray[np.float64], npt.NDArray[np.float64], _U64]
STAGES: tuple[str, ...]
"""The names of the stages of write and read jobs."""

class Descriptor:
    """An open file or folder. It is closed when it is dropped, and in a forked child. One thread at a time uses it."""

    def fileno(self) -> int:
        """The number of the descriptor; -1 once it is closed."""

    def close(self) -> None:
        """Close it. Idempotent."""

    def close_written(self) -> None:
        """Close it; raises OSError where the file system tells only now that it lost what was written."""

    def __enter__(self) -> int:
        """The number of the descriptor."""

    def __exit__(self, *error: object) -> None:
        """Close it."""

def open_descriptor(path: str | bytes | os.PathLike[str], flags: int, mode: int) -> Descriptor:
    """Open a file or folder, as ``os.open`` does, which no forked program inherits. Raises OSError."""

def crc32(data: Buffer, value: int = 0) -> int:
    """CRC-32 of ``data``, continued from ``value``."""

def crc32_combine(first: int, second: int, second_length: int) -> int:
    """CRC-32 of A followed by B, from the CRC-32 of A, the CRC-32 of B, and B's length."""

def crc32_shift(raw: _U32, nbytes: _U64) -> _U32:
    """Shift each raw CRC-32 by ``nbytes`` zero bytes appended to its data.

    A raw CRC-32 begins at 0 and is not inverted at the end, so it is linear in the data. The shift is linear in the raw
    CRC-32. The shift of 2**32 - 1 by n bytes is the inverted CRC-32 of n zero bytes.
    """

def hash_chunks(data: Buffer) -> bytes:
    """The hash ``nh-128``, of 16 bytes, of each chunk of ``data``, end to end.

    A chunk has 256 KiB, and the last one the rest. ``docs/format.md`` describes the hash. The GIL is released.
    """

def host_fingerprints(ptr: _U64, nbytes: _U64) -> _U64:
    """A fingerprint of each range of host memory; 0 of a range that is not readable. The GIL is released.

    Above 4 KiB it is over 32 samples of 8 bytes: it tells that a whole range was rewritten.

    Args:
        ptr: Address of each range.
        nbytes: Length of each range.
    """

class Digester:
    """Computes digests from a sequence of bytes. A digest is the exclusive or of shifted raw CRC-32s."""

    def __init__(
        self, *, digests: int, offset: _U64, length: _U64, run_length: _U64, after: _U64, step: _U64, digest: _U32
    ) -> None:
        """Take stretches of runs by ascending offset; see ``datastates.planning.plans.DigestRuns``."""

    def update(self, data: Buffer) -> None:
        """Take the next bytes; those of the first call begin at offset 0."""

    def finish(self) -> _U32:
        """The digests of all bytes taken."""

def look(
    arrays: list[Any],
    known: bytes,
    memory_of: Callable[[Any], object] | None,
    is_negated: Callable[[Any], bool] | None,
    plain: tuple[type, ...],
) -> tuple[bytes, bytes, bytes, list[object]] | None:
    """Look at each array once; returns (places, addresses, versions, memory), or None.

    Args:
        arrays: The arrays.
        known: Places of an earlier look. If they are the same, they are returned themselves.
        memory_of: Called with each array; its results are ``memory``. None leaves ``memory`` empty.
        is_negated: Called with each array; where it says True, the result is None. None asks for nothing.
        plain: The classes that the arrays may have; empty for any.

    Returns:
        ``places`` is equal for two lists exactly if their arrays have, in order, the same types, addresses, devices,
        element types, shapes and strides. ``addresses`` and ``versions`` have a 64-bit word for each array: the address
        of its first element, and torch's version counter of changes in place (-1 without one). None if an array does
        not offer DLPack's C exchange API or is of no class in ``plain``.
    """

def split(
    form: tuple[Any, ...], value: object, is_plain: Callable[[object], bool]
) -> tuple[list[Any], list[Any]] | None:
    """Split a nested value by the form of an earlier one, into arrays and plain values, each in the form's order.

    Args:
        form: A tuple for each container: its type (dict, OrderedDict, list or tuple); a dict's keys as a list, or the
            length of a list or tuple; its items: None if all are arrays, True if all are plain values, else a list with
            None, True or a form for each; the attributes of an OrderedDict as a dict.
        value: The value. Whatever is in an array's place counts as an array.
        is_plain: Called with values in the places of plain ones that are of no builtin class.

    Returns:
        None if the value has another form, if it has a dict or list twice, or if ``is_plain`` denies a value.
    """

def module_tensors(module: object, base: type) -> tuple[list[Any], list[object]] | None:
    """The tensors that ``state_dict(keep_vars=True)`` of a torch module returns, and all else that its result tells.

    Two modules whose second lists are equal have equal keys and metadata.

    Args:
        module: The module.
        base: ``torch.nn.Module``.

    Returns:
        None if a module or a class in it has a say in its state, by a hook or a method, or is unusual otherwise.
    """

def layout(
    arrays: list[Any], is_negated: Callable[[Any], bool]
) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes] | None:
    """Read the layout of each array; returns (addresses, devices, elements, ndim, dims, strides), or None.

    ``ndim`` has a byte for each array; the others have 64-bit words. ``addresses`` are those of the first elements.
    ``devices`` and ``elements`` encode the device and the element type. ``dims`` and ``strides`` are the shapes and the
    strides in elements, of all arrays end to end. None as for ``look``, and for more than 255 dimensions.
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
    """Read the opcodes of an object that holds only dicts, lists, tuples, plain values, and arrays of given rows.

    The arrays must be the rows in their order, written exactly as ``data.pkl`` holds them. It imports nothing, and
    calls only ``reference`` and ``ordered_dict``.

    Args:
        opcodes: The pickle.
        keys: Key of each row.
        kinds: Names of the kinds of array.
        dtypes: Names of the element types.
        frames: For each element type: the bytes before and after an array's numbers, the bytes of an element, and
            whether its storage counts elements.
        kind: Index of each row's kind in ``kinds``.
        dtype: Index of each row's element type in ``dtypes``.
        record: Number of each row's storage record.
        record_nbytes: Length of the record.
        offset: Offset of the row in the record, in bytes.
        ndim: Number of dimensions of each row.
        dims: Shapes, end to end.
        strides: Strides in elements, end to end.
        reference: Called as ``reference(key, kind, dtype, shape, stride, requires_grad, parameter)`` for each array;
            its result takes the array's place.
        ordered_dict: The class ``OrderedDict``.

    Returns:
        The value in a tuple. None if the object holds anything else; it must then be read opcode by opcode.
    """

def arm_fault(point: str, action: str, value: int = 0, nth: int = 1, count: int = 0) -> None:
    """Make an operation fail in the whole process, for tests.

    Args:
        point: open, write, read, sync, close, allocate, uring_setup, uring_probe, uring_enter, cuda_alloc
            (host memory from which kernels read their work), cuda_register (page-locking the host cache), cuda_slab
            (the device cache), host_read (capturing host memory by process_vm_readv), or capture (of an extent whose
            sources are all lazy, which is put off while the point fails).
        action: "fail" with errno ``value``, "short" (about half the bytes), "eintr", "kill" (SIGKILL to this process),
            or "delay" (``value`` milliseconds, or until the faults are cleared).
        value: See ``action``.
        nth: The passage of the point, counted from 1, that triggers first.
        count: Number of times that the point triggers; 0 for no limit, but once for "eintr".
    """

def clear_faults() -> None:
    """Disarm every fault point, and end the delays under way."""

def cuda_device_count() -> int:
    """Number of CUDA devices that the driver shows; 0 without a driver."""

class ReplicaRanges:
    """Where arrays lie that several ranks hold alike. Immutable."""

    def __init__(
        self,
        *,
        device: _I32,
        stream: _U64,
        nbytes: _U64,
        position: _U64,
        digest: _U32,
        eager: _U8,
        digests: int,
    ) -> None:
        """Check the columns, which have one entry for each range of memory.

        Args:
            device: CUDA device number, or -1 for host memory.
            stream: The CUstream that produces the memory of a device; 0 for the legacy default stream.
            nbytes: Length in bytes.
            position: Number of the range's first word, of 8 bytes, in its digest.
            digest: Number of the digest that the range belongs to.
            eager: 1 if the memory may change once ``submit_write`` returns.
            digests: Number of digests.
        """

class WritePlan:
    """The layout of a container file. Checked once, then used for any number of snapshots. Immutable."""

    def __init__(
        self,
        *,
        source_nbytes: _U64,
        chunk_bytes: int,
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
        patch_after: _U64,
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
        """Check and copy the planner's arrays; see ``datastates.planning.plans.WritePlan``.

        Extents tile the file from 0, and pieces tile their extents. The length of an extent is a multiple of 4096,
        except for the last one. ``piece_source`` -1 is the literal. A source is cut at multiples of 8, and its pieces
        are in order in the file. Eager sources come before lazy ones. A patch writes its source's CRC-32,
        little-endian, into the extent with the source's last piece or a later one. Runs are sorted by source, then by
        offset; see ``datastates.planning.plans.DigestRuns``.
        """

    @property
    def eager_extents(self) -> int:
        """Number of extents that hold bytes of eager sources: the first ones."""

    @property
    def file_length(self) -> int:
        """Where the last extent ends in the file, in bytes."""

class ReadPlan:
    """The ranges to read from a container file, their destinations and their checksums. Immutable."""

    def __init__(
        self,
        *,
        dest_nbytes: _U64,
        extent_offset: _U64,
        extent_length: _U64,
        extent_shared: _U8,
        extent_span: _U64,
        span_offset: _U64,
        span_length: _U64,
        span_count: _U64,
        span_step: _U64,
        extent_piece: _U64,
        piece_dest: _I32,
        piece_dest_offset: _U64,
        piece_extent_offset: _U64,
        piece_length: _U64,
        piece_count: _U64,
        piece_extent_step: _U64,
        piece_dest_step: _U64,
        extent_check: _U64,
        check_offset: _U64,
        check_length: _U64,
        check_crc: _U32,
        check_record: _I32,
    ) -> None:
        """Check and copy the planner's arrays; see ``datastates.planning.plans.ReadPlan``.

        Extents ascend and are at most ``block_bytes - 8192`` long. The first span of an extent begins with it, the last
        one ends with it, and none overlap. Only spans are read. Each stretch of a piece and each check lies within a
        stretch of a span.
        """

class Executor:
    """The host cache, the threads and the io_uring rings. Jobs keep it alive."""

    @property
    def backend(self) -> str:
        """The I/O backend: "io_uring" or "pwrite"."""

    @property
    def cache_bytes(self) -> int:
        """Limit of the host cache: as many whole blocks as fit the requested size."""

    @property
    def block_bytes(self) -> int:
        """Length of a block, the unit of the host cache."""

    @property
    def pinned(self) -> bool:
        """Whether the host cache, as far as it has grown, is page-locked for CUDA.

        A background thread page-locks it once a device is in use. If the system refuses, for example by a limit on
        locked memory, everything still works, but slower.
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
            cache_bytes: Limit of the host cache.
            block_bytes: Length of a block of the host cache, a multiple of 4096; no extent is longer.
            queue_depth: Reads in flight at the same time with io_uring; twice as many writes.
            backend: "auto" (io_uring where the system allows it, else pwrite), "io_uring" or "pwrite".
            direct: Use O_DIRECT where the file system allows it.
            io_threads: Threads of the pwrite backend for reading, and as many for writing.
            device_cache_bytes: Limit, for each device, of the free device memory to which a gate copies state that is
                not yet being copied to the host; 0 for none. A margin of the device's memory is left free.
        """

    def prepare_cache(self, nbytes: int) -> None:
        """Allocate memory for ``nbytes`` of the host cache in the background, while nothing is read."""

    def prepare_device(self, device: int) -> None:
        """Make a CUDA device known before its first job, so that reserved memory is page-locked for it."""

    def submit_write(
        self,
        place: str | bytes | Outlet | None,
        plan: WritePlan,
        ptr: _U64,
        device: _I32,
        stream: _U64,
        witness: _U8,
        replicas: ReplicaRanges | None = None,
        replica_ptr: _U64 | None = None,
    ) -> WriteJob:
        """Start a write job, and return once the eager sources are captured.

        Capturing waits for free cache blocks. If this call raises, it leaves no file.

        Args:
            place: The container, as for :meth:`WriteJob.create`. None: the caller creates it later. Nothing is written
                before. So this call would wait for ever if the eager sources needed more blocks than the cache has.
            plan: The plan.
            ptr: Address of each source. The memory must stay alive until it is captured or the job is aborted; that of
                lazy sources must stay unchanged as well.
            device: CUDA device number of each source, or -1 for host memory.
            stream: The CUstream that produces each device source; 0 for the legacy default stream.
            witness: 1 for each source to take a fingerprint of; see ``torn``.
            replicas: Memory to digest, whether or not it is written; None for none.
            replica_ptr: Address of each range of ``replicas``. The memory must stay as that of the sources does.
        """

    def submit_read(
        self,
        place: str | bytes | _HandedFile,
        plan: ReadPlan,
        ptr: _U64,
        device: _I32,
        stream: _U64,
    ) -> ReadJob:
        """Start a read job.

        Args:
            place: The path of the container, or an object that hands over its bytes.
            plan: The plan.
            ptr: Address of each destination. The memory must stay alive until the job is done or destroyed.
            device: CUDA device number of each destination, or -1 for host memory.
            stream: CUstream of each device destination. Copies wait for the work that is on it now.
        """

    def submit_hash(self, nbytes: _U64, ptr: _U64, device: _I32, stream: _U64) -> HashJob:
        """Start to take the hashes of chunks that :func:`hash_chunks` takes, where the memory lies.

        All workers hash host memory; on each device one kernel does, as soon as the work on the sources' streams now
        has ended.

        Args:
            nbytes: Length of each source; of an empty one there are no chunks.
            ptr: Address of each source. The memory must stay alive and unchanged until the job is done or destroyed.
            device: CUDA device number of each source, or -1 for host memory.
            stream: The CUstream that produces each device source; 0 for the legacy default stream.
        """

    def close(self) -> None:
        """Refuse new jobs, and wait until the running ones are done or have failed. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: never wait for the parent's threads again, even when objects are destroyed."""

class HandedBytes(Buffer):
    """Bytes of a file, held in the host cache until this object and all views of it are gone."""

    def __len__(self) -> int: ...

class Outlet:
    """An iterator over the bytes of one job's file, in their order. Thread-safe.

    It waits for the next ones. After the job has failed it raises ClosedError. Whoever iterates tells how it ended.
    """

    def __init__(self, name: str | bytes) -> None:
        """``name``: of the object that is made, for errors."""

    def __iter__(self) -> Outlet: ...
    def __next__(self) -> HandedBytes: ...
    def finish(self) -> None:
        """Tell that the object is made and durable."""

    def fail(self, number: int, operation: bytes, path: bytes, text: bytes) -> None:
        """Let the job fail with a StorageError of these parts."""

class WriteJob:
    """One container that is being captured and written. Destroying it before ``finish`` aborts it."""

    @property
    def captured(self) -> bool:
        """Whether all sources are copied."""

    @property
    def written(self) -> bool:
        """Whether all extents are written; they need not be synced."""

    def create(self, place: str | bytes | Outlet) -> None:
        """Create the file in the background; it must not exist. If that fails, the job fails.

        An outlet hands the file over instead. Call it once, and only if ``submit_write`` got no place.
        """

    @property
    def made(self) -> bool:
        """Whether the job has created its file, or has begun to hand it over."""

    def wait_made(self, timeout: float | None = None) -> bool:
        """Wait until the job has created its file; False after ``timeout``. Raises the error of a failed job."""

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Wait until all sources are copied; False after ``timeout``. Raises the error of a failed job."""

    def wait_checksummed(self, timeout: float | None = None) -> bool:
        """Wait until all checksums and digests are known, which is before the last extents are written.

        Returns False after ``timeout``. Raises the error of a failed job.
        """

    def gate(self, streams: Sequence[tuple[int, int]], timeout: float | None = None) -> bool:
        """Return when the sources may be changed by the CPU and by later work on ``streams``.

        It waits until every host source is copied and every device copy is enqueued. Then it makes each stream, given
        as (device, stream handle), wait for the copies of its device. The sources' memory must still stay alive until
        it is captured. Returns False after ``timeout``. A failed job reads nothing more: the result is True, and its
        error is not raised.
        """

    def torn(self) -> list[int]:
        """Numbers of the sources whose fingerprint changed or whose memory was gone. Valid once captured."""

    def replica_digests(self) -> tuple[_U64, list[int]]:
        """The digests of the replicas, and the numbers of those whose memory was unmapped. Valid once captured."""

    def checksums(self) -> tuple[_U32, _U32]:
        """CRC-32 of each source, and CRC-32 of each chunk of all sources end to end.

        Raises DatastatesError before they are known.
        """

    def digests(self) -> _U32:
        """The plan's digests. Raises DatastatesError before they are known."""

    def finish(self, tail: Buffer) -> None:
        """Wait until all extents are written, append ``tail``, cut the file to length, sync it and close it.

        A file that is handed over gets its end first; this then waits until its outlet is told that it is made.

        Raises the error of a failed job, and ClosedError after ``abort`` or an earlier ``finish``.
        """

    def abort(self) -> None:
        """Stop; returns when the caller's memory is no longer accessed and the file is closed. Idempotent."""

    def stats(self) -> dict[str, Any]:
        """Statistics of the job so far.

        Keys: bytes (of the file), extents, capture_seconds (from submit to captured), direct, backend ("memory" for a
        file in a memory file system), pinned (whether the host cache is page-locked), device_cache_bytes (copied to
        free device memory at a gate), evacuate_seconds (spent enqueueing those copies), dropped_spans (spans that
        ``timeline`` has no room for).
        """

    def timeline(self) -> _Spans:
        """Spans of work, in columns: number of the stage in :data:`STAGES`, track, begin, end, bytes.

        Times are on the clock of ``time.monotonic``. Stages: submit (submit_write), create (the file), capture,
        cache_wait (for a free block), checksum (of device sources), write (one extent), tail, sync. Spans of one stage
        and track do not overlap, except for cache_wait. A job keeps its first 200,000 spans.
        """

class HashJob:
    """Hashes of memory that are being taken. Destroying it waits until no source is read. Thread-safe."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no source is read any more; False after ``timeout``. Raises DeviceError for a failed device."""

    @property
    def hashes(self) -> npt.NDArray[np.uint8]:
        """The hashes of all chunks of all sources end to end, in rows of 16 bytes.

        Raises DatastatesError before they are known, and DeviceError for a failed device.
        """

    @property
    def lost(self) -> list[int]:
        """The sources whose memory was unmapped before it was hashed: they have no valid hashes. Raises as above."""

class _HandedFile(Protocol):
    name: bytes
    best_piece: int
    def read_into(self, spans: Sequence[tuple[int, memoryview]]) -> None: ...

class ReadJob:
    """One container that is being read into its destinations. Destroying it stops it and waits."""

    def wait(self, name_record: Callable[[int], str], timeout: float | None = None) -> bool:
        """Wait until everything is read, verified and in its destinations; False after ``timeout``.

        Raises CorruptError for the first bad checksum in the file, whose key ``name_record`` gives for its
        ``check_record``. Destinations may have been overwritten by then.
        """

    def stop(self) -> None:
        """Let nothing more begin. Idempotent."""

    def end(self) -> None:
        """Stop, and return when no memory is written any more. Idempotent."""

    def stats(self) -> dict[str, Any]:
        """Statistics of the job; complete once it is done.

        Keys: bytes_needed (of the plan's spans), bytes_read (with alignment), in_place_bytes (read straight into
        destinations), cached_bytes (of the needed bytes, those in the page cache or in memory), seconds, direct,
        backend, dropped_spans.
        """

    def timeline(self) -> _Spans:
        """Spans of work as in ``WriteJob.timeline``.

        Stages: read (one extent), verify, copy (from a block to its destinations).
        """
