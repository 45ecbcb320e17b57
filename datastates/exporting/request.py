""":class:`ExportRequest`: the options of an export, which are checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from datastates.commit.names import checked_step
from datastates.exporting.safetensors_layout import parse_size
from datastates.exporting.target import is_file, refuse_existing
from datastates.restoring.renaming import Renames, checked_renames
from datastates.restoring.selection import checked_keys
from datastates.storage.location import Location, PathLike

CASTS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The types that floating-point tensors can be cast to: the usual short names, and torch's."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Which tensors of a checkpoint are exported, where to, and how. Immutable.

    Attributes:
        target: The file or folder to make.
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
