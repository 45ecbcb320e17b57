"""The interface to the native core, which carries out plans."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from datastates import _native
from datastates._base import faults
from datastates._base.columns import I32, U8, U64
from datastates._base.sizes import CHUNK, PAGE
from datastates.config import IoSettings
from datastates.errors import ClosedError
from datastates.executor.handed import Handed, Uploads
from datastates.executor.jobs import HashJob, ReadJob, WriteJob
from datastates.planning.plans import NO_RUNS, DigestRuns, ReadPlan, WritePlan, fields_of
from datastates.planning.write import plan_dense_write
from datastates.state.shards import Buffer
from datastates.storage.location import Location
from datastates.storage.stores import store_of

PreparedWrite = _native.WritePlan
ReplicaRanges = _native.ReplicaRanges
Columns: TypeAlias = "tuple[U64, I32, U64]"
"""Addresses, device numbers and stream handles of buffers."""


def prepare_write(plan: WritePlan, literal: bytes | memoryview, runs: DigestRuns = NO_RUNS) -> PreparedWrite:
    """Translate the plan of a container into the native core's form, which serves any number of snapshots.

    Args:
        plan: The layout of the container.
        literal: The file's bytes between the records' data, end to end.
        runs: The stretches of the plan's sources to compute digests of.

    Raises:
        DatastatesError: The plan contradicts itself.
    """
    return _native.WritePlan(
        **fields_of(plan, but=("order", "header_offset", "data_offset", "end")),
        chunk_bytes=CHUNK,
        literal=literal,
        digests=runs.digests,
        **{f"runs_{name}": column for name, column in fields_of(runs, but=("digests",)).items()},
    )


def _prepare_read(plan: ReadPlan) -> _native.ReadPlan:
    return _native.ReadPlan(
        **fields_of(plan, but=("extent_needed", "extent_between", "extent_unverified", "unverified_dest"))
    )


def _opened(path: Location) -> bytes:
    """The place of a container in the form that the native core opens: the bytes of its path."""
    return os.fsencode(path)


class Executor:
    """The native executor with its host cache. Thread-safe. After a fork, the child makes a new one at first use."""

    def __init__(self, settings: IoSettings, host_cache: int) -> None:
        """Begin with an empty host cache.

        Args:
            settings: How to read and write files: block size, queue depth, number of workers.
            host_cache: Limit of the host cache in bytes; at least two blocks.
        """
        self.block = int(settings.block)
        self.cache = cache = host_cache // self.block * self.block
        self._options: dict[str, Any] = {
            "cache_bytes": cache,
            "block_bytes": self.block,
            "queue_depth": settings.queue_depth,
            "backend": settings.io_backend,
            "direct": settings.direct_io,
            "io_threads": settings.io_threads,
            "device_cache_bytes": settings.device_cache,
        }
        self._uploads = Uploads(self.block, cache)
        self._closed = False
        self._native: _native.Executor | None = _native.Executor(**self._options)
        _live.add(self)

    def _core(self) -> _native.Executor:
        if self._closed:
            raise ClosedError("the executor is closed")
        if self._native is None:
            self._native = _native.Executor(**self._options)
        return self._native

    def _forget(self) -> None:
        # the parent's threads and rings do not exist in the child, so the child must not try to end them
        if self._native is not None:
            self._native.abandon()
            self._native = None

    def prepare(self, device: int, nbytes: int) -> None:
        """Allocate ``nbytes`` of the host cache, page-locked for a CUDA device, in the background and after reads.

        Raises:
            DeviceError: There is no such device.
        """
        self._core().prepare_device(device)
        self._core().prepare_cache(nbytes)

    def submit_write(
        self,
        path: Location | None,
        prepared: PreparedWrite,
        sources: Columns,
        witness: U8,
        replicas: tuple[ReplicaRanges, U64] | None = None,
    ) -> WriteJob:
        """Start a write job; eager sources are captured when this returns. If it raises, it leaves no file.

        Args:
            path: The container, which must not exist. It is created in the background; if that fails, the job fails.
                None: nothing is written until :meth:`create` is called. The eager sources must then fit into the host
                cache.
            prepared: The container's plan, from :func:`prepare_write`.
            sources: The memory of the plan's sources. It must stay alive until it is captured or the job is aborted.
            witness: For each source, 1 to take the fingerprints that :meth:`WriteJob.torn` compares.
            replicas: Memory to digest, whether or not it is written, and the address of each range of it. It must stay
                alive like the sources.
        """
        place = None if path is None else self._place(path, prepared)
        return self._core().submit_write(place, prepared, *sources, witness, *(replicas or ()))

    def create(self, job: WriteJob, path: Location, prepared: PreparedWrite) -> None:
        """Create the container of a job that was submitted without a path, in the background.

        A failure fails the job. ``prepared`` is its plan.
        """
        job.create(self._place(path, prepared))

    def _place(self, path: Location, prepared: PreparedWrite) -> bytes | _native.Outlet:
        """The path of a new container; what hands it over, if it is an object of a store."""
        store = store_of(path)
        if store.traits.has_files:
            return _opened(path)
        return self._uploads.begin(store, path, prepared.file_length)

    def submit_read(
        self,
        path: Location,
        plan: ReadPlan,
        dests: Columns,
        name_record: Callable[[int], str],
    ) -> ReadJob:
        """Start reading a container's ranges into memory.

        Args:
            path: The container.
            plan: The ranges to read, and their destinations.
            dests: The memory of the plan's destinations. It must stay alive until the job is done.
            name_record: Gives the key of a record by its number, for errors.
        """
        store = store_of(path)
        handed = None if store.traits.has_files else Handed(store, path)
        job = self._core().submit_read(handed or _opened(path), _prepare_read(plan), *dests)
        return ReadJob(job, plan, name_record, handed)

    def submit_digests(self, replicas: tuple[ReplicaRanges, U64]) -> WriteJob:
        """Start to take the digests of memory that several ranks hold. Nothing is written: abort the job at its end.

        Args:
            replicas: As for :meth:`submit_write`.

        Raises:
            DeviceError: A kernel cannot be started, or a source's stream is being captured.
        """
        none = np.zeros(0, np.uint64)
        plan = prepare_write(plan_dense_write(none, [], 0, self.block), b"")
        return self.submit_write(None, plan, columns([]), np.zeros(0, np.uint8), replicas)

    def submit_hash(self, sources: Columns, nbytes: U64) -> HashJob:
        """Start to take a hash of 128 bits of each chunk of 256 KiB of some memory, where it lies.

        Args:
            sources: The memory. It must stay alive and unchanged until the job is done or destroyed.
            nbytes: The length of each source.

        Raises:
            DeviceError: A kernel cannot be started, or a source's stream is being captured.
        """
        return self._core().submit_hash(nbytes, *sources)

    @staticmethod
    def fingerprints(pointers: U64, nbytes: U64) -> U64:
        """A fingerprint of each range of host memory, of 32 samples where it is long; 0 of memory that is gone."""
        return _native.host_fingerprints(pointers, nbytes)

    def extent_for(self, nbytes: int) -> int:
        """Longest extent in bytes for reading ``nbytes``: half of a queue slot's share, but at least 1 MiB.

        It is at most a block, less room for alignment to pages on both sides.
        """
        depth: int = self._options["queue_depth"]
        return min(self.block - 2 * PAGE, max(nbytes // (2 * depth), 4 * CHUNK))

    def close(self) -> None:
        """Wait for running jobs and release the host cache. Idempotent."""
        self._closed = True
        if self._native is not None:
            self._native.close()
            self._native = None
        self._uploads.close()


def columns(buffers: Sequence[Buffer]) -> Columns:
    """Turn buffers into columns for the native core: addresses, device numbers, stream handles."""
    return (
        np.array([b.pointer for b in buffers], np.uint64),
        np.array([b.device for b in buffers], np.int32),
        np.array([b.stream for b in buffers], np.uint64),
    )


_live: weakref.WeakSet[Executor] = weakref.WeakSet()


def _after_fork() -> None:
    for executor in list(_live):
        executor._forget()


os.register_at_fork(after_in_child=_after_fork)


def arm_faults(text: str) -> None:
    """Arm the points that ``text`` names, as ``DATASTATES_FAULTS`` does."""
    for fault in faults.parse(text):
        if "." in fault.point:
            faults.arm(fault)
        else:
            _native.arm_fault(fault.point, fault.action, fault.value, fault.nth, 1)


arm_faults(os.environ.get("DATASTATES_FAULTS", ""))
