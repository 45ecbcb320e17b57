"""The protocol of a format: :class:`Format` recognises and opens what :class:`Opened` then describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from datastates.container.pickle_reader import Trust
from datastates.executor.executor import Executor
from datastates.reading.tensors import TensorFile, Tensors
from datastates.state.new_memory import Into
from datastates.storage.location import Location


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        path: The file.
        key: The tensor or object, or the part of the file, that is wrong.
        what: What is wrong with it.
    """

    path: Location
    key: str
    what: str


class Opened(Protocol):
    """A checkpoint of any format, opened. Not thread-safe."""

    @property
    def format(self) -> str:
        """What it is: the name of its format."""

    @property
    def tensors(self) -> Tensors:
        """Its logical tensors."""

    @property
    def files(self) -> Sequence[TensorFile]:
        """All files that tensors lie in.

        Raises:
            FormatError: A file is damaged.
            StorageError: A file is missing or cannot be read.
        """

    @property
    def nbytes(self) -> int:
        """Bytes that :meth:`verify` reads."""

    @property
    def proof(self) -> str:
        """What :meth:`verify` has proven when it finds nothing, as the end of a sentence."""

    def load(self, executor: Callable[[int], Executor], *, trust: Trust, into: Into) -> dict[str, Any]:
        """Read all of it into new memory, and verify what has checksums.

        Args:
            executor: Makes an executor for reading so many bytes.
            trust: Classes that pickled objects may have, as ``module.qualname``, or ``"all"``.
            into: Whose arrays to read into.

        Raises:
            DatastatesError: As for :func:`datastates.load`.
        """

    def verify(self, progress: Callable[[int], object]) -> Iterator[Problem]:
        """Read all of it, and compare it with its checksums and lengths.

        ``progress`` is called with the number of bytes after each read.
        """


class Format(Protocol):
    """A format of checkpoints: a module with these functions."""

    @property
    def NAME(self) -> str:
        """What a checkpoint of the format is, with its article."""

    def recognises(self, path: Location) -> bool:
        """Whether a file or folder is of the format, judged by what it holds. Reads little of it.

        Raises:
            StorageError: It cannot be read.
        """

    def open(self, path: Location) -> Opened:
        """Open what was recognised. Reads no tensor.

        Raises:
            FormatError: It is damaged; the message names the file.
            StorageError: A file is missing or cannot be read.
        """
