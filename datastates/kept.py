"""Settings of the checkpoints that are kept in a place, and of further places."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict, Unpack

from datastates.errors import SettingsError


def text_of(error: ErrorDetails) -> str:
    """What pydantic says of one wrong field."""
    return "unknown setting" if error["type"] == "extra_forbidden" else error["msg"].removeprefix("Value error, ")


@dataclass(frozen=True, slots=True)
class Keep:
    """The checkpoints that retention keeps, as ``keep_last`` and the like say.

    All, if ``last`` and ``best`` are None. With ``best`` alone, the newest whole one stays, too.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    mode: Literal["min", "max"] = "min"


class RetentionSettings(BaseModel):
    """Settings of the checkpoints that are kept in a place."""

    keep_last: int | None = Field(
        None,
        ge=1,
        description="Number of newest whole checkpoints to keep; None keeps all, or one with keep_best.",
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        description="Number of steps: checkpoints at multiples of it are kept in addition to the newest ones; needs "
        "keep_last or keep_best.",
    )
    keep_best: int | None = Field(
        None,
        ge=1,
        description="Number of best whole checkpoints to keep in addition to the newest ones, by the metric given to "
        "snapshot(). NaN is never the best.",
    )

    @model_validator(mode="after")
    def _retention_is_possible(self) -> RetentionSettings:
        if self.keep_every is not None and self.keep_last is None and self.keep_best is None:
            raise ValueError("keep_every: nothing is deleted without keep_last or keep_best")
        return self


class TierOptions(TypedDict, total=False):
    """The fields of :class:`RetentionSettings` as keyword arguments, for type checkers."""

    keep_last: int | None
    keep_every: int | None
    keep_best: int | None


class TierSettings(RetentionSettings):
    """A further tier of a :class:`~datastates.Checkpointer`: a place that its checkpoints are brought to, too."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    path: str | os.PathLike[str] = Field(description="A directory, or an address such as ``s3://bucket/run``.")

    def __init__(self, path: str | os.PathLike[str], **options: Unpack[TierOptions]) -> None:
        """Take the path, and the fields of retention; raises SettingsError for an impossible one."""
        try:
            BaseModel.__init__(self, path=path, **options)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, e['loc'][:1]))}: {text_of(e)}".lstrip(": ") for e in error.errors())
            raise SettingsError(f"the tier {path!s:.80}: {said}") from None


def _as_tiers(value: object) -> object:
    """Take a path for a tier, and one tier for several."""
    several = [value] if isinstance(value, (str, os.PathLike, Mapping, TierSettings)) else value
    return tuple(map(_as_tier, several)) if isinstance(several, Iterable) else value


def _as_tier(one: object) -> object:
    if isinstance(one, Mapping):
        if "path" not in one:
            raise ValueError(f"the tier {dict(one)} has no path")
        return TierSettings(**one)
    return TierSettings(one) if isinstance(one, (str, os.PathLike)) else one


Tiers = Annotated[tuple[TierSettings, ...], BeforeValidator(_as_tiers)]
