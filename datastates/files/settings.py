"""Settings of checkpoints that are files of a framework."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, field_validator

from datastates.config import IoOptions, IoSettings
from datastates.kept import Tiers, TierSettings
from datastates.storage import Location, store_of


class FileSettings(IoSettings):
    """Settings of checkpoints in files: the fields of :class:`~datastates.config.IoSettings`, and more."""

    on_error: Literal["raise", "warn"] = Field(
        "raise",
        description="Raise a failure of a checkpoint at a later save or at the end, on all its ranks, or only log it.",
    )
    max_in_flight: int = Field(
        2, ge=1, le=64, description="Checkpoints that may be under way at once; a further save waits."
    )
    tiers: Tiers = Field(
        (),
        description="Further places that each complete checkpoint is brought to in the background: a path or an "
        "address each, or TierSettings with retention of their own.",
    )

    @field_validator("tiers")
    @classmethod
    def _can_be(cls, tiers: tuple[TierSettings, ...]) -> tuple[TierSettings, ...]:
        for tier in tiers:
            store_of(Location.of(tier.path))  # raises ValueError
            if tier.keep_best is not None:
                raise ValueError(f"{tier.path}: keep_best: the files of a framework tell no metric")
        return tiers


class FileOptions(IoOptions, total=False):
    """The fields of :class:`FileSettings` as keyword arguments, for type checkers."""

    on_error: Literal["raise", "warn"]
    max_in_flight: int
    tiers: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | TierSettings]


class FolderSettings(FileSettings):
    """Settings of checkpoints that all ranks save together: as :class:`FileSettings`, and one more."""

    rank_timeout: float = Field(
        600.0, gt=0, description="Seconds that a rank waits for the others to have written; then it names the missing."
    )


class FolderOptions(FileOptions, total=False):
    """The fields of :class:`FolderSettings` as keyword arguments, for type checkers."""

    rank_timeout: float
