"""The library and the device of the new arrays that a checkpoint is read into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal, TypeAlias

from datastates.state import devices, memory
from datastates.state.shards import ArrayRef

Framework: TypeAlias = Literal["pt", "np"]
"""The library of new arrays, named as in ``safetensors.safe_open``: ``"pt"`` for torch, ``"np"`` for NumPy."""
Device: TypeAlias = Any
"""A ``torch.device``, or its name or number: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or the number of a CUDA device."""
_KINDS = {"pt": "torch", "np": "numpy"}


@dataclass(frozen=True, slots=True)
class Into:
    """Chooses library and device of the new arrays that stored arrays are read into.

    Attributes:
        framework: The library of all new arrays. None: torch for an array that torch saved, if torch is installed, and
            NumPy for every other array.
        device: The CUDA device of torch's arrays; None for host memory.
    """

    framework: Framework | None = None
    device: Any = None

    @classmethod
    def of(cls, framework: Framework | None, device: Device) -> Into:
        """Check the framework and the device that the user gave.

        Raises:
            TypeError, ValueError: There is no such framework or device, or a device beside the CPU for NumPy's arrays.
            ImportError: torch is wanted and not installed.
        """
        if framework not in (None, *_KINDS):
            raise ValueError(f"framework: {framework!r:.40} is neither 'pt' nor 'np'")
        if framework == "np":
            if str(device).partition(":")[0] != "cpu":
                raise ValueError(f"device: {device!r:.80} beside framework='np', whose arrays are in host memory")
            return cls(framework)
        if framework == "pt":
            try:
                import_module("torch")
            except ImportError as error:
                raise ImportError("framework: 'pt' needs torch, which is not installed") from error
        return cls(framework, devices.chosen(device))

    @property
    def with_torch(self) -> bool:
        """Whether torch may be imported to build arrays and objects."""
        return self.framework != "np"

    def kind(self, saved: str) -> str:
        """The library of the new array for an array that was saved by the library ``saved``."""
        return saved if self.framework is None else _KINDS[self.framework]

    def allocate(self, saved: str, nbytes: int) -> Any:
        """Allocate bytes for arrays that the library ``saved`` saved; see :func:`datastates.state.memory.allocate`."""
        return memory.allocate(self.kind(saved), nbytes, self.device)

    def view(self, block: Any, ref: ArrayRef, offset: int) -> Any:
        """View memory of :meth:`allocate` as an array; see :func:`datastates.state.memory.view`."""
        return memory.view(block, self._of(ref), offset)

    def empty(self, ref: ArrayRef) -> Any:
        """Allocate an array for a stored one; see :func:`datastates.state.memory.empty`."""
        return memory.empty(self._of(ref), self.device)

    def _of(self, ref: ArrayRef) -> ArrayRef:
        kind = self.kind(ref.kind)
        return ref if kind == ref.kind else replace(ref, kind=kind)


AS_SAVED = Into()
"""New arrays in host memory: torch's for arrays that torch saved, if it is installed, and NumPy's for all others."""
