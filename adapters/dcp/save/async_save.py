"""``async_save``: saves a checkpoint of torch.distributed.checkpoint while training goes on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import Unpack

from datastates._base import gc_pause
from datastates._base.waiting import Flag
from datastates.adapters.dcp.names import NAME
from datastates.adapters.dcp.save.ending import IN_FLIGHT, DcpEnding, Order, Turn
from datastates.adapters.dcp.save.global_plan import Planning
from datastates.adapters.dcp.save.items import Written, boxes_of
from datastates.adapters.dcp.save.local_plans import LocalPlans
from datastates.adapters.dcp.save.writer import DataStatesStorageWriter, WriterOptions
from datastates.adapters.shared.guarded import guarded_of
from datastates.errors import CommitError, DatastatesError, SnapshotAbandonedError
from datastates.files.boxes import BoxFiles
from datastates.files.staging import Staged
from datastates.files.torch_files import Lazy
from datastates.ranks.board_world import text_of
from datastates.ranks.world import world_of
from datastates.saving.engine import Engine
from datastates.saving.running import Running
from datastates.saving.snapshot import Snapshot
from datastates.storage import Location, store_of


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    storage_writer: DataStatesStorageWriter | None = None,
    planner: SavePlanner | None = None,
    step: int = 0,
    **options: Unpack[WriterOptions],
) -> Snapshot:
    """Save a state dict so that ``dcp.load`` and torch's own reader load it; returns before it is captured.

    All ranks of the default process group call it together, on the training thread. Large tensors are captured while
    training goes on, and every torch optimizer's ``step()`` waits for that. Small tensors, buffers of modules and
    objects are copied before this returns. In the background the ranks agree which rank writes which item. They use
    torch's Store instead of collectives, and one exchange suffices if only values have changed since the writer's last
    save. Where two saves are under way already, the call waits for the older one.

    Args:
        state_dict: As for ``dcp.save``: nested, with DTensors, modules, optimizers and other ``Stateful`` objects.
        path: The directory, or an address in a store. It becomes a checkpoint in one step, once all ranks have written.
        storage_writer: Keeps plans and pinned memory for the next save. Without a writer they serve this save only.
        planner: Plans the save; by default a ``DefaultSavePlanner``.
        step: A number for the snapshot and its report.
        **options: Without a writer, options of :class:`~datastates.adapters.dcp.DataStatesStorageWriter`.

    Returns:
        The snapshot. Once it is *captured*, the state may change; once it is *persisted*, this rank's file is on stable
        storage; once it is *committed*, ``dcp.load`` finds the checkpoint. The interpreter's exit waits for that.

        It fails with a CommitError if another rank has failed, and with a ProviderError, which names the tensor, if a
        tensor cannot be stored.

    Raises:
        TypeError: Options were given together with a writer.
        ValueError: ``path`` is an address that no store serves, or the writer has extensions.
        SettingsError: An option is unknown or its value is invalid.
        SnapshotAbandonedError: This process was forked from the one that saves with the writer.
        DatastatesError: The ranks could not meet for the first save with the writer.
    """
    with refusing(storage_writer):
        store_of(directory := Location(path))
        if storage_writer is not None and options:
            raise TypeError(f"{', '.join(options)}: given to the storage_writer, or here without one")
        if storage_writer is not None and storage_writer.transforms.extensions:
            raise ValueError("extensions: this writes none; dcp.save and dcp.async_save do, with the same writer")
    writer = storage_writer or DataStatesStorageWriter(path, **options)
    session = session_of(writer)
    try:
        return session.save(state_dict, directory, planner or DefaultSavePlanner(), step)
    finally:
        if storage_writer is None:
            session.close_later()


def session_of(writer: DataStatesStorageWriter) -> Session:
    """The session that a writer keeps from one save to the next; the first call makes it."""
    if writer.session is None:
        writer.session = Session(writer)
    assert isinstance(writer.session, Session)
    return writer.session


@contextlib.contextmanager
def refusing(writer: DataStatesStorageWriter | None) -> Iterator[None]:
    """Tell the other ranks if this rank fails to begin a save with a writer that has saved before."""
    try:
        yield
    except Exception as error:
        if writer is not None and isinstance(writer.session, Session):
            writer.session.refuse(error)
        raise


class Session:
    """The state that a writer keeps for saves without collectives: threads, plans, the order of saves."""

    def __init__(self, writer: DataStatesStorageWriter) -> None:
        """Meet the other ranks in torch's Store."""
        self._writer = writer
        self._files = BoxFiles(writer.settings)
        # one name for all: the store keeps what it has heard of each
        self._world = world_of(None, None, Location("dcp-save"), writer.settings.rank_timeout)
        self._process = os.getpid()
        self._engine = Engine(self._files.executor, self._world, threads=IN_FLIGHT, auto_gate=True)
        self._plans = LocalPlans()
        self._planning = Planning(self._world)
        self._order = Order()
        self._numbers = itertools.count()
        self._before = Flag()
        self._before.set()

    def save(
        self, state_dict: dict[str, Any], path: Location, planner: SavePlanner, step: int = 0, *, owned: bool = False
    ) -> Snapshot:
        """Begin a save; see :func:`async_save`, and for ``owned`` :class:`Staged`."""
        turn = self.reserve()
        try:
            lazy = _lazy(state_dict, self._writer.lazy)
            plain = {key: v.state_dict() if isinstance(v, Stateful) else v for key, v in state_dict.items()}
            staged = Staged(plain, lazy, step=step, path=path, grace=float("inf"), owned=owned)
            return self.save_staged(staged, path, planner, turn)
        except BaseException as error:
            self.decline(turn, error)
            raise

    def reserve(self) -> Turn:
        """Take the next save's turn, which has the same number on all ranks. Waits while two saves are under way.

        Raises:
            SnapshotAbandonedError: This process was forked from the one that saves.
        """
        if os.getpid() != self._process:
            raise SnapshotAbandonedError("this process was forked from one that saves, so it cannot save")
        turn = self._next_turn()
        try:
            self._engine.wait(IN_FLIGHT)
        except BaseException as error:  # an interrupt
            self.decline(turn, error)
            raise
        return turn

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, in the background, that this one takes no part in the next save."""
        self.decline(self._next_turn(), error)

    def _next_turn(self) -> Turn:
        number = next(self._numbers)
        turn = Turn(f"dcp/{number}", number, self._before, Flag())
        self._before = turn.after
        return turn

    def save_staged(self, staged: Staged, path: Location, planner: SavePlanner, turn: Turn) -> Snapshot:
        """Begin to save a staged state; errors of the save itself land on its snapshot. If it raises, decline."""
        writer = copy.copy(self._writer)  # another save may set another directory before this one begins
        # emptied by the call: frames that live on must not keep the state alive
        begin = [partial(self._begin, staged, writer, path, planner, turn)]
        self._engine.take_later(staged.snapshot, lambda: begin.pop()(), staged.give_up)
        return staged.snapshot

    def _begin(
        self, staged: Staged, writer: DataStatesStorageWriter, path: Location, planner: SavePlanner, turn: Turn
    ) -> Running:
        """Plan a save with the other ranks and begin to write. Every rank does so in the order of the calls."""
        if turn.taken.take() is None:
            error = CommitError("the call was interrupted")
            staged.give_up(error)
            staged.snapshot.exception()  # told: the call has raised the interrupting error
            raise error
        with turn, staged.capturing():
            writer.reset(str(path))
            writer.set_up_storage_writer(self._world.rank == 0, rank=self._world.rank, use_collectives=True)
            meta = writer.storage_meta()
            # no closure: an error's frames would keep its variables alive
            prepare = partial(self._plan, staged, writer, planner, meta)
            agreed = self._planning.agree(turn.name, planner, prepare, writer.prepare_global_plan)
            ending = DcpEnding(self._world, turn, path, agreed, meta, self._order)
            try:
                plan = planner.finish_plan(agreed.plan)
                ending.path = writer.new_file(plan)
                indices: dict[str, MetadataIndex] = {}
                running, file = self._files.begin(NAME, boxes_of(plan, planner, indices), staged, ending)
                ending.written = Written(file, indices)
            except BaseException as error:
                staged.give_up(error)  # training need not wait until the other ranks have heard of it
                self._engine.decline(ending, error)
                raise
            return running

    @gc_pause.paused()
    def _plan(
        self, staged: Staged, writer: DataStatesStorageWriter, planner: SavePlanner, meta: StorageMeta | None
    ) -> SavePlan:
        staged.check()
        planner.set_up_planner(staged.state_dict, meta, self._world.rank == 0)
        # a subclass's prepare_local_plan() may change the plan, so it is not given a kept one
        kept = type(writer) is DataStatesStorageWriter
        return writer.prepare_local_plan(self._plans.plan(planner) if kept else planner.create_local_plan())

    def decline(self, turn: Turn, error: BaseException) -> None:
        """Tell the other ranks, in the background, that this one takes no part in a save, unless it has begun."""
        if turn.taken.take() is None:
            return
        told = CommitError(text_of(error))

        def tell() -> None:
            with turn, contextlib.suppress(DatastatesError):  # the call raises the error itself
                self._planning.decline(turn.name, told)

        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            self._engine.do_aside(tell)

    def close(self) -> None:
        """Wait for the saves in flight, and give threads and memory back."""
        self._engine.close()

    def close_later(self) -> None:
        """Leave the other ranks, in the background, once the saves in flight have ended."""
        self._engine.close_later()


def _lazy(state_dict: dict[str, Any], chosen: Lazy) -> Lazy:
    """As ``chosen``, but False for what more than the optimizers of a state dict may change in its modules."""
    values = state_dict.values()
    optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    is_guarded = guarded_of([value for value in values if isinstance(value, torch.nn.Module)], optimizers)
    return lambda name, tensor: is_guarded(name, tensor) and chosen(name, tensor)
