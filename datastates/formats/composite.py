"""Checkpoints that other tools make of weights or of a file of ``torch.save``: what tells them, and what lies where."""

from __future__ import annotations

import errno
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from datastates.container.pickle_reader import Trust
from datastates.errors import FormatError, StorageError
from datastates.executor.executor import Executor
from datastates.formats import dcp, hugging_face, torch_file
from datastates.formats.foreign import Foreign, refuse_repeated
from datastates.formats.format import Format, Problem
from datastates.formats.hugging_face import read_object
from datastates.formats.seen import Seen
from datastates.formats.torch_file import TorchCheckpoint, TorchFile
from datastates.state.new_memory import Into
from datastates.storage import store_of
from datastates.storage.location import Location


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A format of folders: weights of another format, a file of JSON, and files of ``torch.save``.

    Attributes:
        NAME: The name of a checkpoint of the format, with its article.
        weights: The format of the weights, which keep their names.
        file, kind, field: The name of the file of JSON, what it is, and the field of it that is read.
        most: Longest such file in bytes that is read.
        others: Globs of the other files that are read. Their keys begin with the stem of their file.
        backend: What the field must say. Without it, the field is the step.
        refusal: Why a folder with that file and without weights is not read. Without it, it is of another format.
    """

    NAME: str
    weights: Format
    file: str
    kind: str
    field: str
    most: int
    others: tuple[str, ...]
    backend: str = ""
    refusal: str = ""

    def recognises(self, seen: Seen) -> bool:
        """As :meth:`Format.recognises`."""
        return seen.has(self.file) and (bool(self.refusal) or self.weights.recognises(seen))

    def open(self, path: Location) -> Composite:
        """As :meth:`Format.open`."""
        file, seen = path / self.file, Seen(path)
        if self.refusal and not self.weights.recognises(seen):
            raise StorageError(errno.ENOENT, "open", str(path), f"{path} {self.refusal}")
        told = read_object(file, self.field, self.kind, most=self.most)[self.field]
        if self.backend and told != self.backend:
            raise FormatError(f"{file}: the checkpoint is of the backend {told!r:.40}, and only {self.backend} is read")
        names = {name for glob in self.others for name in fnmatch.filter(seen.names, glob)}
        found = [path / name for name in sorted(names) if seen.has(name)]
        weights = self.weights.open(path)
        assert isinstance(weights, Foreign)
        return Composite(
            self.NAME, path, weights, {o.stem: TorchFile(o, o.stem) for o in found}, told if type(told) is int else None
        )


MEGATRON = FolderFormat(
    "a checkpoint of Megatron-Core (torch_dist)",
    dcp,
    *("metadata.json", "description of a checkpoint", "sharded_backend", 1 << 16),
    ("common.pt",),
    backend="torch_dist",
)
TRAINER = FolderFormat(
    "a checkpoint of a Trainer",
    hugging_face,
    *(
        "trainer_state.json",
        "state of a Trainer",
        "global_step",
        1 << 30,
    ),  # it has a line for each step that was logged
    ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth"),  # training_args.bin holds no tensor
    refusal="has no weights in the files of one rank: neither model.safetensors nor pytorch_model.bin",
)


class _Lightning:
    """A file of ``torch.save`` with Lightning's version among its first keys."""

    NAME = "a checkpoint of Lightning"
    _VERSION = "pytorch-lightning_version"
    _HEAD = 1 << 16  # bytes at the beginning that hold the begin of the pickle, in which the version comes early

    def recognises(self, seen: Seen) -> bool:
        """As :meth:`Format.recognises`."""
        if not torch_file.recognises(seen):
            return False
        return self._VERSION.encode() in store_of(seen.path).read(seen.path, 0, min(seen.nbytes, self._HEAD))

    def open(self, path: Location) -> TorchCheckpoint:
        """As :meth:`Format.open`."""
        file = TorchFile(path)
        value = file.value if isinstance(file.value, dict) else {}
        step = value.get("global_step") if self._VERSION in value else None
        return TorchCheckpoint(self.NAME, path, [file], step if type(step) is int else None)


LIGHTNING = _Lightning()


class Composite(Foreign):
    """A checkpoint of weights under their own names, and the tensors of each other file under the file's stem."""

    def __init__(
        self, format: str, path: Location, weights: Foreign, others: Mapping[str, TorchFile], step: int | None = None
    ) -> None:
        """Join the opened files.

        Args:
            format: The name of the format.
            path: The folder.
            weights: The weights.
            others: The other files, by the key that all keys of the file begin with.
            step: The step of the checkpoint; None if no file tells it.

        Raises:
            FormatError: A tensor of the weights has the key of another one.
        """
        super().__init__(format, path, [*weights.files, *others.values()], step)
        refuse_repeated(path, [*others.values()], weights.keys)
        self._weights = weights
        self._others = others

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> dict[str, Any]:
        """Read the weights by full key, and the value of each other file by the file's stem."""
        found: dict[str, Any] = self._weights.load(executor, trust=trust, into=into)
        return found | {k: file.load(executor, trust=trust, into=into) for k, file in self._others.items()}

    def verify(self, progress: Callable[[int], object]) -> Iterator[Problem]:
        """Verify the weights as :meth:`Foreign.verify` does, then all records of the other files."""
        yield from self._weights.verify(progress)
        yield from Foreign(self.format, self.path, [*self._others.values()]).verify(progress)
