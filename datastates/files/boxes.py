"""Writes named boxes of tensors, and bytes, into one container in which each record is an archive of one tensor."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from datastates._base import gc_pause
from datastates.commit.ending import FileEnding, identity_alone
from datastates.commit.votes import Vote
from datastates.config import IoSettings
from datastates.errors import CommitError, ProviderError
from datastates.executor.make import make_executor
from datastates.files.staging import Staged
from datastates.ranks.world import World, settle
from datastates.saving.container_frame import ContainerFrame, ContainerFraming
from datastates.saving.running import Running
from datastates.saving.saver import Saver
from datastates.saving.snapshot import describe
from datastates.state import arrays, dtensors, subclasses
from datastates.state.provider import StateProvider
from datastates.state.shards import Buffer, Shard
from datastates.storage import Location, store_of


class Box(NamedTuple):
    """One tensor to write, as a box of a logical tensor; or bytes, which have no shape.

    Attributes:
        key: Its name in the file.
        data: The torch tensor, or a BytesIO.
        shape: The planned shape of the box.
        begin: First index of the box in its logical tensor.
        whole: The shape of the logical tensor.
        source: The live value that the tensor is a part of. A DTensor has a version of its own.
    """

    key: str
    data: Any
    shape: tuple[int, ...] | None = None
    begin: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    source: object = None


class _Boxes(StateProvider):
    """Boxes as array shards. A tensor that consists of other tensors is stored as bytes are, by torch's own pickle."""

    def __init__(self, name: str, boxes: Iterable[Box]) -> None:
        """Take the boxes. Tensors must not change before they are captured; objects are pickled now.

        Raises:
            ProviderError: A tensor cannot be stored, or has another shape than planned; the message names it.
        """
        super().__init__(name)
        memory: dict[tuple[object, ...], Shard] = {}
        self._shards: list[Shard] = []
        for box in boxes:
            data = box.data
            if box.shape is not None and _is_composed(data):
                data = _pickled(data)
            if isinstance(data, io.BytesIO):
                shard = arrays.array_shard(box.key, np.frombuffer(data.getbuffer(), np.uint8), lazy=False)
            else:
                shard = _tensor_shard(box, data.detach())
                buffer = shard.buffer
                assert buffer is not None
                # a record is an archive of one tensor: a tensor that shares its memory in another shape is copied
                first = memory.setdefault((buffer.device, buffer.pointer, buffer.nbytes, shard.dtype), shard)
                if (first.shape, first.stride) != (shard.shape, shard.stride):
                    shard = _tensor_shard(box, data.detach().clone())
                elif dtensors.is_dtensor(box.source) and arrays.address(box.source) == arrays.address(data):
                    shard = replace(shard, source=box.source)
                if not buffer.nbytes:  # empty tensors of different shapes must not share a record
                    shard = replace(shard, buffer=Buffer(len(self._shards) + 1, 0), buffer_offset=0)
            self._shards.append(shard)

    def shards(self) -> Sequence[Shard]:
        """The boxes, each as an array shard."""
        return self._shards


def _is_composed(tensor: Any) -> bool:
    """Whether a tensor consists of other tensors, as torchao's do. Torch saves such a tensor by its class."""
    import torch

    return arrays.kind_of(tensor) is None and subclasses.is_composed(tensor) and tensor.layout is torch.strided


def _pickled(tensor: Any) -> io.BytesIO:
    """The bytes that torch's own writer stores for a tensor. The class's own code makes them, so they are made now."""
    import torch

    file = io.BytesIO()
    torch.save(tensor.detach().cpu(), file)
    return file


def _tensor_shard(box: Box, tensor: Any) -> Shard:
    if tuple(tensor.shape) != box.shape:
        raise ProviderError(f"{box.key!r}: its tensor has shape {tuple(tensor.shape)}, planned {box.shape}")
    try:
        shard = arrays.array_shard(box.key, tensor, lazy=True)
    except TypeError as error:
        raise ProviderError(str(error)) from None
    return replace(shard, global_shape=box.whole, offset=box.begin)


@dataclass(frozen=True, slots=True, eq=False)
class BoxFile:
    """A file that is being written.

    Attributes:
        path: Its path.
        frame: The places of everything in it.
    """

    path: Location
    frame: ContainerFrame

    def places(self, nbytes: int) -> Iterator[tuple[str, tuple[int, int]]]:
        """The key of each box, with offset and length: of a tensor's archive, or of bare bytes.

        Args:
            nbytes: The length of the file as it was written.

        Raises:
            StorageError: The file has been removed.
            CommitError: The file has another length, so it was replaced.
        """
        there = store_of(self.path).length(self.path)
        if there != nbytes:
            raise CommitError(f"{self.path} was replaced: it has {there} bytes, and {nbytes} were written")
        for row, data, archive in self.frame.places():
            yield row.key.partition("/")[2], data if row.kind == "numpy" else archive


class AgreedFile(FileEnding):
    """One rank's file of boxes, of a checkpoint that the ranks agree on. A rank that fails tells the others, once."""

    def __init__(self, path: Location, world: World, name: str) -> None:
        """Prepare the end of a file. ``name``: the vote of the ranks, which also names the files of the checkpoint."""
        super().__init__(path, identity_alone(world.token(name)))
        self.world = world
        self.name = name
        self.voted = self.kept = False

    @override
    def commit(self, vote: Vote) -> Location:
        return self.publish(vote.files[0].nbytes)

    def publish(self, nbytes: int) -> Location:
        """Agree with the other ranks, once the file of ``nbytes`` is on stable storage; returns the checkpoint's path.

        Sets ``voted`` before it tells the others anything, and ``kept`` if the checkpoint may stand and need the file.
        """
        raise NotImplementedError

    @override
    def abandon(self, *, made: bool) -> None:
        super().abandon(made=made and not self.kept)

    @override
    def decline(self, error: BaseException) -> None:
        if not self.voted and self.world.size > 1:
            self.voted = True
            with contextlib.suppress(Exception):  # this rank's own error is the one to report
                settle(self.world, self.name, error, b"", lambda _: b"")


class BoxFiles:
    """Writes such files, one after another, and keeps threads, pinned memory and plans between them.

    Attributes:
        executor: The executor; :meth:`close` closes it.
    """

    def __init__(self, settings: IoSettings) -> None:
        """Start the executor."""
        self.executor = make_executor(settings)
        self._saver = Saver(self.executor, ContainerFraming(nested=True))

    @gc_pause.paused()
    def begin(self, name: str, boxes: Iterable[Box], staged: Staged, ending: FileEnding) -> tuple[Running, BoxFile]:
        """Begin to capture boxes, and to write them.

        Args:
            name: The first part of each key in the file, before a slash.
            boxes: The boxes to write, of the staged state.
            staged: The state. Its snapshot goes on with the file.
            ending: The path of the file, which nothing has yet, and its commit or removal.

        Returns:
            The rest of the work, to be run; and the file, which tells the places of the boxes once it is written.

        Raises:
            ProviderError: A tensor cannot be stored; the message names it.
            StorageError: The file cannot be made.
            TornSnapshotError: The state has changed since it was staged; from this call on, the snapshot watches it.
        """
        collected = self._saver.collect([_Boxes(name, boxes)])
        describe(staged.snapshot, nbytes=collected.structure.nbytes)
        running = self._saver.prepare(collected, staged.snapshot, ending)
        try:
            running.begin()
            running.open()
            running.job.wait_made()  # no other file may take the name
            staged.check()
        except BaseException as error:
            running.cancel(error)
            raise
        frame = running.planned.frame
        assert isinstance(frame, ContainerFrame)
        return running, BoxFile(ending.path, frame)

    def begin_alone(
        self, name: str, boxes: Iterable[Box], staged: Staged, path: Location, attempt: str
    ) -> tuple[Running, BoxFile]:
        """As :meth:`begin`, for a file that is complete once it is written. ``attempt`` is a name of the save."""
        return self.begin(name, boxes, staged, FileEnding(path, identity_alone(attempt)))

    def close(self) -> None:
        """Free threads and memory."""
        self.executor.close()
