""":class:`ExportRequest`: the options of an export, which are checked once."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from datastates.commit.names import PARTIAL, checked_step
from datastates.exporting.layouts import parse_size
from datastates.restoring.renaming import Renames, checked_renames
from datastates.restoring.selection import checked_keys
from datastates.storage import store_of
from datastates.storage.location import Location, PathLike

CASTS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The types that floating-point tensors can be cast to: the usual short names, and torch's."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Which tensors of a checkpoint are exported, where to, and how. Immutable.

    Attributes:
        target: The file or folder to make, or its address in a store.
        step: The step of the checkpoint; None for the newest, or for that of a single checkpoint.
        keys: Globs of full keys.
        rename: New names.
        dtype: Torch's name of the type that floating-point tensors are cast to; None casts nothing.
        shard_nbytes: Most bytes of tensors in a file of a folder.
    """

    target: Location
    step: int | None = None
    keys: Sequence[str] = ("*",)
    rename: Renames = field(default_factory=lambda: MappingProxyType({}))
    dtype: str | None = None
    shard_nbytes: int = 5 * 10**9

    @classmethod
    def of(
        cls,
        target: PathLike,
        *,
        step: int | None,
        keys: str | Sequence[str],
        rename: Renames,
        dtype: object,
        shard_size: str | int | None,
    ) -> ExportRequest:
        """Check arguments as a user gave them; those of :func:`datastates.export`.

        Raises:
            FileExistsError: ``target`` exists.
            TypeError, ValueError: A value is impossible, or values exclude each other.
        """
        to, cast, globs = Location.of(target), _cast_type(dtype), checked_keys(keys)
        if shard_size is not None and is_file(to):
            raise ValueError(f"shard_size: {to.name} is one file; give a folder for several")
        nbytes = parse_size(str("5GB" if shard_size is None else shard_size))
        refuse_existing(to)
        wish = None if step is None else checked_step(step)
        return cls(to, wish, globs or ("*",), checked_renames(rename), cast, nbytes)


def _cast_type(dtype: object) -> str | None:
    """Torch's name of the type to cast to, given as ``"bf16"``, ``"bfloat16"`` or ``torch.bfloat16``; None for None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = CASTS.get(name, name)
    if name not in CASTS.values():
        raise ValueError(f"dtype: {dtype} is none of {', '.join([*CASTS, *CASTS.values()])}")
    return name


SAFETENSORS = ".safetensors"
"""The end of the name of a single safetensors file."""
TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""The ends of the names of files that ``torch.load`` opens, by PyTorch's and its trainers' conventions."""

INSIDE = "export"
"""The name before ``.partial-`` of an export's partial directory inside a folder."""


def is_torch(target: Location) -> bool:
    """Whether a target is a file for ``torch.load``, by the end of its name."""
    return target.name.endswith(TORCH)


def is_file(target: Location) -> bool:
    """Whether a target is a single file. Any other is a folder of safetensors files."""
    return target.name.endswith((SAFETENSORS, *TORCH))


def place_of_partial(target: Location) -> Location:
    """The path whose partial directory an export writes into: inside a folder that is there, else beside the target.

    A folder that is there keeps its mode, its owner and whatever stands in it or is mounted on it. A link is followed.
    """
    return target / INSIDE if store_of(target).is_folder(target) and not is_file(target) else target


def refuse_existing(target: Location) -> None:
    """Raise FileExistsError if the target of an export exists and is no empty folder.

    Partial directories of other exports in a folder do not count: their files do not have their names yet.
    """
    store = store_of(target)
    if store.is_folder(target) and not is_file(target):
        if all((match := PARTIAL.match(name)) and match[1] == INSIDE for name in store.names(target)):
            return
        raise FileExistsError(errno.EEXIST, "the target of an export is not empty", str(target))
    if store.exists(target) or store.is_link(target):
        raise FileExistsError(errno.EEXIST, "the target of an export exists", str(target))
