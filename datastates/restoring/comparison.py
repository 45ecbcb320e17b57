""":class:`Comparison`: the outcome that a restore would have."""

from __future__ import annotations

from dataclasses import dataclass

from datastates.restoring.restored import Restored
from datastates.storage.location import Face


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome that a restore would have, on this rank. Its text has a line for each key.

    Attributes:
        path: The path of the checkpoint; a string for an address in a store.
        step: The training step that would be restored.
        restored_keys: Full keys, in the live state, of the arrays and objects that would be restored, converted arrays
            among them.
        cast_keys: Keys of the arrays whose element type would be converted, each with the stored and the live type.
        missing_keys, unexpected_keys, mismatched_keys, left_out_keys: As in
            :class:`~datastates.restoring.restored.Restored`.
        nbytes: Bytes that this rank would fill without a conversion.
    """

    path: Face
    step: int
    restored_keys: tuple[str, ...]
    cast_keys: dict[str, str]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched_keys: dict[str, str]
    left_out_keys: tuple[str, ...]
    nbytes: int

    @classmethod
    def of(cls, path: Face, result: Restored, restored: list[str], nbytes: int) -> Comparison:
        """Make a comparison from the findings of a restore that has not read yet.

        Args:
            path: The path of the checkpoint.
            result: The differences.
            restored: Full keys of the shards to restore. The key of several parts may occur several times.
            nbytes: Bytes to fill without a conversion.
        """
        return cls(
            path,
            result.step,
            tuple(dict.fromkeys(restored)),
            result.cast_keys,
            tuple(result.missing_keys),
            tuple(result.unexpected_keys),
            result.mismatched_keys,
            tuple(result.left_out_keys),
            nbytes,
        )

    @property
    def fits(self) -> bool:
        """Whether a strict restore would accept the checkpoint."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched_keys)

    def __str__(self) -> str:
        """The outcome for each key, one key a line."""
        plain = [key for key in self.restored_keys if key not in self.cast_keys]
        lines = [
            *(("restored", key, "") for key in plain),
            *(("cast", key, types) for key, types in self.cast_keys.items()),
            *(("mismatched", key, what) for key, what in self.mismatched_keys.items()),
            *(("missing", key, "not in the checkpoint") for key in self.missing_keys),
            *(("unexpected", key, "not in the live state") for key in self.unexpected_keys),
            *(("left out", key, "") for key in self.left_out_keys),
        ]
        return "\n".join([f"{self.path}, step {self.step}", *(f"  {a:<10}  {b}  {c}".rstrip() for a, b, c in lines)])
