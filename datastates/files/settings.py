"""Settings of checkpoints that are files of a framework."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from datastates.config import IoOptions, IoSettings


class FileSettings(IoSettings):
    """Settings of checkpoints in files: the fields of :class:`~datastates.config.IoSettings`, and more."""

    on_error: Literal["raise", "warn"] = Field(
        "raise",
        description="Raise a failure of a checkpoint at a later save or at the end, on all its ranks, or only log it.",
    )
    max_in_flight: int = Field(
        2, ge=1, le=64, description="Checkpoints that may be under way at once; a further save waits."
    )


class FileOptions(IoOptions, total=False):
    """The fields of :class:`FileSettings` as keyword arguments, for type checkers."""

    on_error: Literal["raise", "warn"]
    max_in_flight: int


class FolderSettings(FileSettings):
    """Settings of checkpoints that all ranks save together: as :class:`FileSettings`, and one more."""

    rank_timeout: float = Field(
        600.0, gt=0, description="Seconds that a rank waits for the others to have written; then it names the missing."
    )


class FolderOptions(FileOptions, total=False):
    """The fields of :class:`FolderSettings` as keyword arguments, for type checkers."""

    rank_timeout: float
