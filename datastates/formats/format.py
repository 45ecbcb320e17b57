"""The protocol of a checkpoint format: :class:`Format` recognises and opens a path as an :class:`Opened`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from datastates.container.pickle_reader import Trust
from datastates.executor.executor import Executor
from datastates.formats.seen import Seen
from datastates.reading.tensors import TensorFile, Tensors
from datastates.state.new_memory import Into
from datastates.storage.location import Location


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint, found by a verification.

    Attributes:
        path: The file.
        key: The full key of the wrong tensor or object, or the name of the wrong part of the file.
        what: The fault, as the end of a sentence.
    """

    path: Location
    key: str
    what: str


class Opened(Protocol):
    """A checkpoint of any format, opened. Not thread-safe."""

    @property
    def format(self) -> str:
        """The name of the checkpoint's format, with its article."""

    @property
    def tensors(self) -> Tensors:
        """The checkpoint's logical tensors."""

    @property
    def files(self) -> Sequence[TensorFile]:
        """All files of the checkpoint that hold tensors.

        Raises:
            FormatError: A file is damaged.
            StorageError: A file is missing or cannot be read.
        """

    @property
    def nbytes(self) -> int:
        """The number of bytes that :meth:`verify` reads."""

    @property
    def proof(self) -> str:
        """The end of a sentence for the user: what :meth:`verify` has proven when it finds no fault."""

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> Any:
        """Read the whole checkpoint into new memory, and verify all data that has checksums.

        Args:
            executor: Makes an executor that reads so many bytes.
            trust: Classes that pickled objects may have, as ``module.qualname``, or ``"all"``.
            into: Whose arrays to read into.

        Raises:
            DatastatesError: As for :func:`datastates.load`.
        """

    def verify(self, progress: Callable[[int], object]) -> Iterator[Problem]:
        """Read the whole checkpoint, and compare it with its checksums and lengths.

        ``progress`` is called with the number of bytes after each read.
        """


class Format(Protocol):
    """A format of checkpoints: a module with these functions."""

    @property
    def NAME(self) -> str:
        """The name of a checkpoint of this format, with its article."""

    def recognises(self, seen: Seen) -> bool:
        """Whether a file or folder is of the format, judged by its contents. Reads little of it.

        Raises:
            StorageError: It cannot be read.
        """

    def open(self, path: Location) -> Opened:
        """Open a path that :meth:`recognises` accepted. Reads no tensor.

        Raises:
            FormatError: It is damaged; the message names the file.
            StorageError: A file is missing or cannot be read.
        """
