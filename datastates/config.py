"""Settings: models whose fields have a unit, a default and an environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import TypedDict

from datastates._base.sizes import CHUNK, PAGE
from datastates.errors import SettingsError
from datastates.kept import Keep, RetentionSettings, Tiers, TierSettings, text_of

_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d)\s*")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"\s*[0-9]+(\.[0-9]+)?\s*([KMGT]i?)?B?\s*")


def _check_size(value: object) -> object:
    """Raise ValueError for a size that pydantic would misread, in other units or only in part: ``"8 GiB per rank"``."""
    if _SIZE.fullmatch(value) if isinstance(value, str) else isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not a size: use bytes, or a number with B, KB, KiB, MB, MiB, GB, GiB, TB or TiB")


def seconds(text: str) -> float:
    """The seconds that a text such as ``"90"``, ``"2h"`` or ``"30min"`` means; raises ValueError for any other."""
    try:
        return _DURATIONS.validate_python(text)
    except ValidationError:
        raise ValueError(f"{text!r} is no time: seconds, or a number with s, min, h or d") from None


def _in_seconds(value: object) -> object:
    """Turn a number with a unit of time into seconds, and leave other numbers to pydantic."""
    if isinstance(value, str) and (found := _DURATION.fullmatch(value)):
        return float(found[1]) * _SECONDS[found[2]]
    return value


Duration = Annotated[float, BeforeValidator(_in_seconds), Field(gt=0, allow_inf_nan=False)]
_DURATIONS: TypeAdapter[float] = TypeAdapter(Duration)
Size = Annotated[ByteSize, BeforeValidator(_check_size)]
SizeOrAuto = Annotated[
    ByteSize | Literal["auto"], BeforeValidator(lambda value: value if value == "auto" else _check_size(value))
]

ENVIRONMENT_PREFIX = "DATASTATES_"


def from_environment(fields: Iterable[str]) -> dict[str, str]:
    """The values of ``fields`` from environment variables, as text by field name; without fields that are not set."""
    found = {field: os.environ.get(ENVIRONMENT_PREFIX + field.upper()) for field in fields}
    return {field: value for field, value in found.items() if value is not None}


_S = TypeVar("_S", bound="IoSettings")


class IoSettings(BaseModel):
    """Settings of the transfer of bytes, which ``snapshot``, ``restore``, ``load`` and ``open`` of this package take.

    Every field that is no callable can also be set by an environment variable: ``DATASTATES_`` and the field's name in
    capitals. An argument wins over the variable, and the variable over the default. Sizes are bytes, or text such as
    ``"8GiB"``. Objects are immutable.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    host_cache: SizeOrAuto = Field(
        "auto",
        description="Limit in bytes of the host cache, the memory that data passes through between the state and the "
        "storage. It is page-locked where CUDA is in use. auto: a quarter of the available memory, divided by "
        "the number of local ranks; the cache then grows only to what the state needs.",
    )
    block: Size = Field(
        ByteSize(8 << 20),
        description="Bytes of one extent, the unit of capture and of I/O; a multiple of 4096 of at least 1 MiB.",
    )
    queue_depth: int = Field(
        8,
        ge=1,
        le=1024,
        description="Extents that io_uring reads at the same time; it writes twice as many.",
    )
    io_backend: Literal["auto", "io_uring", "pwrite"] = Field(
        "auto", description="How files are read and written. auto: io_uring where the kernel allows it, else pwrite."
    )
    device_cache: Size = Field(
        ByteSize(0),
        description="Limit in bytes, for each GPU, of free device memory that uncaptured state is copied to where an "
        "optimizer step would wait for its capture. The memory is given back as the copies reach the "
        "host. 0: none.",
    )
    io_threads: int = Field(
        4, ge=1, le=256, description="Threads of the pwrite backend for reading, and as many for writing."
    )
    direct_io: bool = Field(True, description="Bypass the page cache (O_DIRECT) where the file system supports it.")

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
    def of(cls: type[_S], options: Mapping[str, Any], others: Iterable[str] = ()) -> _S:
        """Make settings from options, the environment and the defaults.

        Args:
            options: Values by field name.
            others: The arguments that the same call takes besides, for the message about an unknown one.

        Raises:
            SettingsError: A field is unknown or its value is impossible. The message names each such field, and the
                environment variable if the value came from one.
        """
        try:
            return cls(**options)
        except ValidationError as error:
            problems = []
            for e in error.errors():
                field = ".".join(map(str, e["loc"][:1]))  # the rest of "loc" names the types that were tried
                variable = ENVIRONMENT_PREFIX + field.upper()
                source = f" (from {variable})" if field not in options and variable in os.environ else ""
                names = ", ".join([*others, *cls.model_fields])
                known = f"; settings are {names}" if e["type"] == "extra_forbidden" else ""
                problems.append((f"{field}{source}: " if field else "") + text_of(e) + known)
            raise SettingsError("; ".join(problems)) from None


class RankSettings(IoSettings):
    """Settings of the ranks' meeting, for ``snapshot`` and ``restore``, in addition to :class:`IoSettings`."""

    rank: int | None = Field(
        None,
        ge=0,
        description="This process's number, from 0, among those that save together; given together with world_size. "
        "The processes then meet in the checkpoints' directory. None: the rank of torch.distributed or, without that, "
        "of jax.distributed, where one of them is initialized with several ranks; else a single process.",
    )
    world_size: int | None = Field(
        None, ge=1, description="Number of processes that save together; given together with rank."
    )
    rank_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds that a rank waits for the others, in a commit or a restore, before it fails with an error "
        "that names the missing ranks.",
    )


class Settings(RankSettings, RetentionSettings):
    """Settings of a :class:`~datastates.Checkpointer`, in addition to :class:`RankSettings`."""

    best_mode: Literal["min", "max"] = Field("min", description="Whether the lowest or the highest metric is the best.")
    tiers: Tiers = Field(
        (),
        description="Further places, in order, that each checkpoint is brought to in the background once it is "
        "committed in the directory: a path or an address each, or TierSettings with retention of their own. A restore "
        "takes the newest checkpoint of all places.",
    )
    per_host: bool = Field(
        False,
        description="The directory is another one on each host, as on local disks: each host keeps the containers of "
        "its ranks.",
    )
    peers: Literal[0, 1] = Field(
        0,
        description="Copies of each rank's container that are kept on other hosts, in the background, through "
        "torch.distributed. Needs per_host.",
    )
    incremental: bool = Field(
        False,
        description="Capture and write only what differs from the checkpoint that the run has committed or restored "
        "last, where the file system shares ranges of files, as XFS and Btrfs do. Each stands alone all the same.",
    )
    full_every: int | None = Field(
        None, ge=1, description="With incremental: each so many checkpoints, one is written in full."
    )
    on_stale: Literal["warn", "error", "ignore"] | None = Field(
        None,
        description="What happens if a torch optimizer has stepped since the last snapshot, and none of its parameters "
        "has changed in what is saved. warn: a warning names them. error: the snapshot fails with StaleStateError. "
        "None: warn with incremental, as long as bytes are shared; else ignore.",
    )
    auto_gate: bool = Field(True, description="Let every torch optimizer's step() wait for capture.")
    on_error: Literal["raise", "warn"] | Callable[[Any], object] = Field(
        "raise",
        description="What happens to a failure in the background. raise: the next snapshot() or close() raises it. "
        "warn: it is only logged and counted. A callable: it is called with the failed snapshot, on a thread of the "
        "checkpointer, and nothing is raised.",
    )
    on_commit: Callable[[Any], object] | None = Field(
        None,
        description="A callable that is called with each committed snapshot, on a thread of the checkpointer: with one "
        "at a time, in the order in which they were taken. It may call close(), which returns at once there. An "
        "exception that it raises is logged.",
    )
    max_in_flight: int = Field(
        2, ge=1, le=64, description="Number of snapshots that may be in flight at the same time."
    )
    when_busy: Literal["wait", "refuse"] = Field(
        "wait",
        description="What snapshot() does when max_in_flight snapshots are in flight. wait: wait until one has ended. "
        "refuse: raise SnapshotRefusedError.",
    )
    every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="The steps at which Checkpointer.due(step) says that a snapshot is due: the multiples of a number "
        "of steps. auto: the steps that lose the least time, from the measured cost of a snapshot and mtbf.",
    )
    mtbf: Duration | None = Field(
        None,
        description='Mean time between failures of the whole job, for every="auto": seconds, or text with a unit: s, '
        "min, h, d.",
    )
    handle_sigterm: bool = Field(
        False,
        description="On SIGTERM, commit the snapshots in flight, then let the process end or call the handler that was "
        "installed before. Training continues meanwhile.",
    )

    grace: Duration | None = Field(
        None,
        description="Time from SIGTERM until the process is killed, as for mtbf. Checkpointer.due(step) then "
        "says that a last snapshot is due if it can be durable in that time. Needs handle_sigterm and every.",
    )

    @model_validator(mode="after")
    def _cadence_is_possible(self) -> Settings:
        if (self.every == "auto") != (self.mtbf is not None):
            raise ValueError('mtbf: every="auto" needs it, and nothing else uses it: give both or none')
        if self.grace is not None and not (self.handle_sigterm and self.every):
            raise ValueError("grace: it needs handle_sigterm=True, and every, for the loop to ask due(step)")
        return self

    @model_validator(mode="after")
    def _full_checkpoints_are_counted(self) -> Settings:
        if self.full_every is not None and not self.incremental:
            raise ValueError("full_every: without incremental, each checkpoint is written in full")
        return self

    @model_validator(mode="after")
    def _ranks_can_meet(self) -> Settings:
        if self.per_host and (self.world_size or 1) > 1:
            raise ValueError(
                "per_host: ranks cannot meet in a directory that is another one on each host: initialize "
                "torch.distributed or jax.distributed, and leave rank and world_size out"
            )
        if self.peers and not self.per_host:
            raise ValueError("peers: set per_host, too: hosts that share one directory need no copies")
        return self

    @property
    def keeps(self) -> list[Keep]:
        """The checkpoints that retention keeps in the first tier, and in each of the others."""
        return [Keep(one.keep_last, one.keep_every, one.keep_best, self.best_mode) for one in (self, *self.tiers)]


class IoOptions(TypedDict, total=False):
    """The fields of :class:`IoSettings` as keyword arguments, for type checkers. Sizes are bytes, or text."""

    host_cache: int | str
    block: int | str
    queue_depth: int
    io_backend: Literal["auto", "io_uring", "pwrite"]
    device_cache: int | str
    io_threads: int
    direct_io: bool


class RankOptions(IoOptions, total=False):
    """The fields of :class:`RankSettings` as keyword arguments, for type checkers."""

    rank: int | None
    world_size: int | None
    rank_timeout: float


class Options(RankOptions, total=False):
    """The fields of :class:`Settings` as keyword arguments, for type checkers."""

    tiers: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | TierSettings]
    keep_last: int | None
    keep_every: int | None
    keep_best: int | None
    best_mode: Literal["min", "max"]
    per_host: bool
    peers: Literal[0, 1]
    incremental: bool
    full_every: int | None
    on_stale: Literal["warn", "error", "ignore"] | None
    auto_gate: bool
    on_error: Literal["raise", "warn"] | Callable[[Any], object]
    on_commit: Callable[[Any], object] | None
    max_in_flight: int
    when_busy: Literal["wait", "refuse"]
    every: int | Literal["auto"] | None
    mtbf: float | str | None
    handle_sigterm: bool
    grace: float | str | None
