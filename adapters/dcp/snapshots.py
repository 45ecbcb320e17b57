"""``async_save``: a checkpoint of torch.distributed.checkpoint as a Snapshot, captured while training goes on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from datastates import durable
from datastates.adapters.dcp import metadata_file
from datastates.adapters.dcp.file_writer import FileWriter, identity
from datastates.adapters.dcp.items import results
from datastates.adapters.dcp.planning import Planning
from datastates.adapters.dcp.staging import Lazy, Staged
from datastates.adapters.dcp.writer import DataStatesStorageWriter
from datastates.barrier import World, world_of
from datastates.committing import Vote, is_told, settle
from datastates.ending import Identity
from datastates.engine import Engine, make_executor
from datastates.errors import DatastatesError
from datastates.futures import Snapshot
from datastates.opened import open_container
from datastates.saving import Running


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    storage_writer: DataStatesStorageWriter | None = None,
    planner: SavePlanner | None = None,
    step: int = 0,
    **options: Any,
) -> Snapshot:
    """Save a state dict so that ``dcp.load`` and torch's own reader load it; returns before it is captured.

    All ranks of the default process group call it together, on the training thread. Large tensors are captured while
    training goes on, and every torch optimizer's ``step()`` waits for that; small ones, a module's buffers and objects
    are copied before this returns. In the background the ranks agree on who writes what, through torch's Store and not
    by collectives: in one exchange where nothing but values has changed since the writer's last save.

    Args:
        state_dict: As for ``dcp.save``: nested, with DTensors, modules, optimizers and other ``Stateful`` objects.
        path: The directory; it becomes a checkpoint at once, when all ranks have written.
        storage_writer: Keeps plans and pinned memory for the next save; without one they are made for this save.
        planner: Plans the save, by default a ``DefaultSavePlanner``.
        step: A number for the snapshot and its report.
        **options: Without a writer, those of :class:`~datastates.adapters.dcp.DataStatesStorageWriter`.

    Returns:
        The snapshot: *captured* the state may change, *persisted* this rank's file is on stable storage, *committed*
        ``dcp.load`` finds it. The interpreter's exit waits for that.

        It fails with a CommitError where another rank has failed, and with a ProviderError that names it where a tensor
        cannot be stored.

    Raises:
        TypeError: Options were given together with a writer.
    """
    if storage_writer is not None and options:
        raise TypeError(f"{', '.join(options)}: given to the storage_writer, or here without one")
    writer = storage_writer or DataStatesStorageWriter(path, **options)
    if writer.session is None:
        writer.session = Session(writer, Path(path))
    session = writer.session
    assert isinstance(session, Session)
    taken = session.save(state_dict, Path(path), planner or DefaultSavePlanner(), step)
    if storage_writer is None:
        session.close_later()
    return taken


_IN_FLIGHT = 2
"""Saves that may be under way at once; a further one waits for the first of them."""


class Session:
    """What a writer keeps for saves that the ranks make by themselves, without collectives."""

    def __init__(self, writer: DataStatesStorageWriter, directory: Path) -> None:
        """Meet the other ranks; ``directory`` only names where."""
        self._writer = writer
        self._timeout = writer.settings.rank_timeout
        self._world = world_of(None, None, directory, self._timeout)
        executor = make_executor(writer.settings)
        self._engine = Engine(executor, self._world, threads=_IN_FLIGHT, auto_gate=True)
        self._files = FileWriter(executor)
        self._planning = Planning(self._world, self._timeout)
        self._numbers = itertools.count()
        self._before = threading.Event()
        self._before.set()

    def save(self, state_dict: dict[str, Any], path: Path, planner: SavePlanner, step: int) -> Snapshot:
        """Begin one; see :func:`async_save`."""
        while len(pending := self._engine.pending()) >= _IN_FLIGHT:
            pending[0].wait_ended()
        writer = copy.copy(self._writer)  # the next save may name another directory before this one has begun
        writer.reset(path)
        writer.set_up_storage_writer(self._world.rank == 0, rank=self._world.rank, use_collectives=True)
        lazy = _lazy(state_dict, writer.lazy)
        plain = {key: v.state_dict() if isinstance(v, Stateful) else v for key, v in state_dict.items()}
        staged = Staged(plain, lazy, step=step, grace=float("inf"))
        staged.snapshot.path = Path(writer.path)
        before, self._before = self._before, threading.Event()
        begin = partial(self._begin, staged, writer, planner, f"dcp/{next(self._numbers)}", before, self._before)
        try:
            self._engine.take_later(staged.snapshot, begin)
        except BaseException as error:
            staged.give_up(error)
            raise
        return staged.snapshot

    def _begin(
        self,
        staged: Staged,
        writer: DataStatesStorageWriter,
        planner: SavePlanner,
        name: str,
        before: threading.Event,
        begun: threading.Event,
    ) -> Running:
        """Plan a save with the other ranks and begin to write; all ranks do that in the order of the calls."""
        before.wait()
        try:
            with staged.capturing():
                meta = writer.storage_meta()
                plan, metadata = self._planning.agree(
                    name, planner, staged.state_dict, meta, writer.prepare_local_plan, writer.prepare_global_plan
                )
                ending = DcpEnding(self._world, f"{name}/commit", Path(writer.path), metadata, meta, self._timeout)
                try:
                    ending.path = writer.new_file(plan)
                    running, ending.indices = self._files.begin(plan, planner, ending, staged.snapshot)
                except BaseException as error:
                    ending.decline(error)
                    raise
                return running
        finally:
            begun.set()

    def close(self) -> None:
        """Wait for what is in flight, and give threads and memory back."""
        self._engine.close()

    def close_later(self) -> None:
        """Leave the other ranks once what is in flight has ended."""
        self._engine.close_later()


def _lazy(state_dict: dict[str, Any], chosen: Lazy) -> Lazy:
    """What was chosen, but for buffers of modules: a forward pass may change those."""
    modules = [value for value in state_dict.values() if isinstance(value, torch.nn.Module)]
    buffers = {b.untyped_storage().data_ptr() for module in modules for b in module.buffers()}
    return lambda name, tensor: tensor.untyped_storage().data_ptr() not in buffers and chosen(name, tensor)


class DcpEnding:
    """One rank's file of a checkpoint, which ``.metadata`` commits. See :class:`~datastates.ending.Ending`."""

    def __init__(
        self, world: World, name: str, path: Path, metadata: Metadata | None, meta: StorageMeta | None, timeout: float
    ) -> None:
        """End with the other ranks; ``metadata`` is the coordinator's."""
        self.path = path
        self.identity: Identity = identity(world.token(name))
        self.committed: float | None = None
        self.indices: dict[str, MetadataIndex] = {}
        self._world = world
        self._name = name
        self._metadata = metadata
        self._meta = meta
        self._timeout = timeout
        self._voted = self._kept = False

    def commit(self, vote: Vote) -> Path:
        """Tell the coordinator where everything is; raises as :func:`~datastates.committing.settle` does."""
        del vote
        directory = self.path.parent
        durable.sync_directory(directory)
        found = pickle.dumps(results(self.indices, open_container(self.path)))

        def decide(told: dict[int, bytes]) -> bytes:
            assert self._metadata is not None
            every = [pickle.loads(told[rank]) for rank in sorted(told)]
            metadata_file.publish(directory / metadata_file.FILE, self._metadata, every, self._meta)
            self.committed = time.monotonic()
            return b""

        self._voted = True
        try:
            settle(self._world, self._name, None, found, decide, timeout=self._timeout)
        except DatastatesError as error:
            if self.committed is None and is_told(error):
                raise
            # not known here, but it may stand: then its files do, too
            self._kept = True
            if self.committed is None and not self._stands():
                raise
        return directory

    def _stands(self) -> bool:
        stored = metadata_file.read(self.path.parent / metadata_file.FILE)
        return self.path.name in metadata_file.files(stored)

    def abandon(self) -> None:
        """Remove the file, unless the checkpoint may have become one."""
        if not self._kept:
            with contextlib.suppress(OSError):  # its writer's error is what is told
                self.path.unlink()

    def decline(self, error: BaseException) -> None:
        """Tell the other ranks, unless they know."""
        if not self._voted and self._world.size > 1:
            self._voted = True
            with contextlib.suppress(Exception):  # this rank's own error is what is told
                settle(self._world, self._name, error, b"", lambda _: b"", timeout=self._timeout)
