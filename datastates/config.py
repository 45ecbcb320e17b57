"""Settings: one model, each field with its unit, default and environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from datastates._base.sizes import CHUNK, PAGE
from datastates.errors import SettingsError

_UNITS = {"": 1, "B": 1, **{p + s: b**i for s, b in (("B", 1000), ("iB", 1024)) for i, p in enumerate("KMGT", 1)}}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B|)\s*\Z")


def parse_size(value: object) -> int:
    """Bytes from an int or from text such as ``"8GiB"``, ``"512 MB"`` or ``"4096"``; ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{value!r} is not a size: use bytes, or a number with B, KB, KiB, MB, MiB, GB, GiB, TB or TiB"
        )
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(lambda v: v if v == "auto" else parse_size(v))]

ENVIRONMENT_PREFIX = "DATASTATES_"


def from_environment(fields: Iterable[str]) -> dict[str, str]:
    """What the environment says of these fields; nothing of those that it does not name."""
    found = {field: os.environ.get(ENVIRONMENT_PREFIX + field.upper()) for field in fields}
    return {field: value for field, value in found.items() if value is not None}


_S = TypeVar("_S", bound="IoSettings")


class IoSettings(BaseModel):
    """How bytes move: what ``snapshot``, ``restore``, ``load`` and ``open`` of this package take.

    Every field can also be given as an environment variable, ``DATASTATES_`` and the field's name in capitals; an
    argument wins over the variable, the variable over the default. Sizes are bytes or text such as ``"8GiB"``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    host_cache: SizeOrAuto = Field(
        "auto",
        description="Bytes of (pinned) host memory that snapshots stream through; used as far as the state needs it. "
        "auto: up to a quarter of the memory available to each local rank.",
    )
    block: Size = Field(
        8 << 20,
        description="Bytes of one extent, the unit of capture and of I/O; a multiple of 4096 of at least 1 MiB.",
    )
    queue_depth: int = Field(
        8,
        ge=1,
        le=1024,
        description="Extents that are read from the storage at a time, with io_uring; twice as many are written.",
    )
    io_backend: Literal["auto", "io_uring", "pwrite"] = Field(
        "auto", description="How to reach the storage; auto takes io_uring where the kernel allows it."
    )
    device_cache: Size = Field(
        0,
        ge=0,
        description="Bytes of spare memory of each GPU that uncaptured state may be copied to when an optimizer step "
        "would wait for it; taken only where it is free, and given back as it drains. 0: none.",
    )
    io_threads: int = Field(4, ge=1, le=256, description="Threads of the pwrite backend, for each direction.")
    direct_io: bool = Field(True, description="Bypass the page cache (O_DIRECT) where the file system can.")

    @model_validator(mode="before")
    @classmethod
    def _environment(cls, given: Any) -> Any:
        return {**from_environment(cls.model_fields), **given}

    @model_validator(mode="after")
    def _blocks_fit(self: _S) -> _S:
        if self.block % PAGE or self.block < 4 * CHUNK:
            raise ValueError(f"block: {self.block} is not a multiple of {PAGE} of at least {4 * CHUNK} bytes")
        if self.host_cache != "auto" and self.host_cache < 2 * self.block:
            raise ValueError(f"host_cache: {self.host_cache} bytes hold less than two blocks of {self.block}")
        return self

    @classmethod
    def of(cls: type[_S], options: dict[str, Any]) -> _S:
        """Validate options; raises SettingsError that names each bad field, and the variable it came from."""
        try:
            return cls(**options)
        except ValidationError as error:
            problems = []
            for e in error.errors():
                field = ".".join(map(str, e["loc"][:1]))  # what follows says which type was tried
                variable = ENVIRONMENT_PREFIX + field.upper()
                source = f" (from {variable})" if field not in options and variable in os.environ else ""
                known = f"; settings are {', '.join(cls.model_fields)}" if e["type"] == "extra_forbidden" else ""
                text = "unknown setting" if known else e["msg"].removeprefix("Value error, ")
                problems.append((f"{field}{source}: " if field else "") + text + known)
            raise SettingsError("; ".join(problems)) from None


class RankSettings(IoSettings):
    """How ranks find each other: what ``snapshot`` and ``restore`` take beside the fields of :class:`IoSettings`."""

    rank: int | None = Field(
        None,
        ge=0,
        description="This process's number among those that save together, with world_size; they then meet in the "
        "checkpoints' directory. None: as torch.distributed says where it is initialized, else the only one.",
    )
    world_size: int | None = Field(None, ge=1, description="How many processes save together; see rank.")
    replicas: Literal["read", "broadcast"] = Field(
        "read",
        description="How ranks that hold a part alike restore it: each reads it, or one reads and torch.distributed "
        "broadcasts it.",
    )
    rank_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds that a rank waits for the others, in a commit or a restore, before it names the missing.",
    )


class Settings(RankSettings):
    """What a :class:`~datastates.Checkpointer` can be told: the fields of :class:`RankSettings`, and these."""

    keep_last: int | None = Field(None, ge=1, description="Checkpoints to keep; None keeps all.")
    keep_every: int | None = Field(
        None, ge=1, description="Steps: checkpoints at multiples of this are kept beside the last ones."
    )
    auto_gate: bool = Field(True, description="Let every torch optimizer's step() wait for capture.")
    on_error: Literal["raise", "warn"] | Callable[[Any], object] = Field(
        "raise",
        description="Raise a background failure at the next snapshot() or close(), or only log and count it. A "
        "callable is given the snapshot that failed, on a thread of the checkpointer, and nothing is raised.",
    )
    on_commit: Callable[[Any], object] | None = Field(
        None,
        description="A callable that is given each snapshot that has been committed, on a thread of the checkpointer. "
        "What it raises is logged.",
    )
    max_in_flight: int = Field(2, ge=1, le=64, description="Snapshots that may be under way at once.")
    when_busy: Literal["wait", "refuse"] = Field(
        "wait", description="What a snapshot() beyond max_in_flight does: wait for one to end, or raise."
    )
    handle_sigterm: bool = Field(
        False,
        description="On SIGTERM, commit the snapshots in flight, then do what the process would have done: end, or "
        "call the handler that was there before. Training goes on meanwhile.",
    )

    @model_validator(mode="after")
    def _retention_is_possible(self) -> Settings:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every: nothing is deleted without keep_last")
        return self
