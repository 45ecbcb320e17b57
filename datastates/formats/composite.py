"""A checkpoint folder of weights, with files of ``torch.save`` beside them, such as an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from datastates.container.pickle_reader import Trust
from datastates.executor.executor import Executor
from datastates.formats.foreign import Foreign, refuse_repeated
from datastates.formats.format import Problem
from datastates.formats.torch_file import TorchFile
from datastates.state.new_memory import Into
from datastates.storage.location import Location


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
