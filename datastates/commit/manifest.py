"""The manifest, which names the files of a checkpoint. A directory without one is no checkpoint.

``docs/format.md`` specifies the format.
"""

from __future__ import annotations

import errno
import functools
import json
import re
import zlib
from collections.abc import Hashable, Mapping
from datetime import datetime, timezone
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from datastates.commit.names import KEPT_FOLDER, with_attempt
from datastates.container.file import Named
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.storage import Entry, store_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT

FILE = "manifest.json"
FORMAT_VERSION, WITH_KEPT = 2, 3
"""The formats of new manifests: of those without kept containers, and of those with. Format 1, which has no
``sequence``, can be read, too."""
MAX_NBYTES = 1 << 28
FENCE = b'{"fence": "no checkpoint will be here"}\n'
"""In a store of objects, what lies in a manifest's place where a commit was given up, or a clean-up came first."""


class DecidedAgainstError(CheckpointNotFoundError):
    """A fence lies in the place of a manifest: no checkpoint will be there."""


_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=255)]
"""A name within the checkpoint's directory: never a path."""
_Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
_Crc32 = Annotated[int, Field(ge=0, lt=1 << 32)]


_CONTAINER = re.compile(r"rank-([0-9]{5,})\.")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ContainerEntry(_Model):
    """One container of a checkpoint."""

    file: _FileName
    rank: Annotated[int, Field(ge=0)]
    nbytes: _Bytes
    index_crc32: _Crc32
    """CRC-32 of its index. The index identifies the snapshot and holds the checksums of all the rest."""
    step: Annotated[int, Field(ge=0, lt=10**18)] | None = None
    """The step that it was made for. Kept containers have it."""
    attempt: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")] | None = None
    """The attempt that has made it. Kept containers have it."""
    folder: Annotated[str, Field(pattern=r"^kept-[0-9]{8,18}\.[0-9a-f]{8}$")] | None = None
    """The folder beside the checkpoint that it lies in; None for the checkpoint's own."""


class CatalogEntry(_Model):
    """The catalog of a checkpoint of several containers."""

    file: _FileName
    nbytes: _Bytes
    head_crc32: _Crc32
    """CRC-32 of its head, which holds the checksums of all the rest."""


class Manifest(_Model):
    """The contents of the manifest, the file that makes a directory a checkpoint."""

    format: int
    step: Annotated[int, Field(ge=0, lt=1 << 63)]
    sequence: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    """Its number in the order of its directory's snapshots: the highest is the newest. Not in format 1."""
    attempt: Annotated[str, Field(max_length=64)]
    """A random name shared by all containers of one snapshot; a kept one may be of an earlier one."""
    created: Annotated[str, Field(max_length=64)]
    """When it was committed, ISO 8601, UTC."""
    metric: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """How good it is, as its writer said."""
    world_size: Annotated[int, Field(ge=1)]
    containers: tuple[ContainerEntry, ...]
    """One of each rank, then the kept containers of the ranks that have one, which only format 3 has."""
    catalog: CatalogEntry | None = None
    """The catalog, which tells the containers that hold each tensor's parts; None for one container."""

    @model_validator(mode="after")
    def _numbered(self) -> Manifest:
        if (self.sequence is None) != (self.format == 1):
            raise ValueError("a sequence belongs to format 2 or 3, and to no other")
        if (len(self.containers) > self.world_size) != (self.format == WITH_KEPT):
            raise ValueError("kept containers belong to format 3, and to no other")
        return self

    @model_validator(mode="after")
    def _one_for_each_rank(self) -> Manifest:
        if (self.catalog is None) != (len(self.containers) == 1):
            raise ValueError("a catalog belongs to a checkpoint of several containers, and to no other")
        ranks, files = [c.rank for c in self.containers], {c.file for c in self.containers}
        own, kept = ranks[: self.world_size], ranks[self.world_size :]
        if len(own) != self.world_size or own != list(range(len(own))) or len(files) != len(ranks):
            raise ValueError("not one container for each rank, each in a file of its own")
        if kept != sorted({*kept}.intersection(own)):
            raise ValueError("not one kept container for each rank that has one")
        for i, c in enumerate(self.containers):
            if [c.step is not None, c.attempt is not None] != [i >= self.world_size] * 2:
                raise ValueError("a step and an attempt belong to a kept container, and to no other")
            if c.folder is not None and i < self.world_size:
                raise ValueError("a folder belongs to a kept container, and to no other")
        if self.catalog is None:
            return self
        attempt = attempt_in(self.catalog.file, self.attempt)
        for c, number in zip(self.containers, self.numbers, strict=True):
            if c.file != file_name(number, self.world_size, attempt):  # no catalog tells names
                raise ValueError("where there are several containers, each must be named by its rank")
            if number >= self.world_size and (c.folder is None) != (attempt == ""):
                raise ValueError("a kept container has a folder in a store of objects, and nowhere else")
        return self

    @property
    def numbers(self) -> list[int]:
        """The number of each container: of a rank its own, of its kept container that and :attr:`world_size`."""
        return [c.rank + (i >= self.world_size) * self.world_size for i, c in enumerate(self.containers)]

    @property
    def nbytes(self) -> int:
        """Length of all containers together, in bytes."""
        return sum(c.nbytes for c in self.containers)


def container_name(rank: int, attempt: str = "") -> str:
    """File name of a rank's container within a checkpoint. In a store of objects it has the name of the attempt."""
    return with_attempt(f"rank-{rank:05d}.pt", attempt)


def kept_name(rank: int) -> str:
    """File name of a rank's kept container: that of the arrays that several checkpoints have alike."""
    return f"rank-{rank:05d}.kept.pt"


def is_kept(file: str) -> bool:
    """Whether the name of a file is that of a kept container."""
    return rank_in(file) is not None and file.split(".")[1] == "kept"


def file_name(number: int, ranks: int, attempt: str = "") -> str:
    """File name of a container by its number, as in :attr:`Manifest.numbers`."""
    return container_name(number, attempt) if number < ranks else kept_name(number - ranks)


def rank_in(file: str) -> int | None:
    """The rank whose container, or kept container, a file is, by its name; None if it is none."""
    return int(match[1]) if (match := _CONTAINER.match(file)) else None


def attempt_in(file: str, attempt: str) -> str:
    """The attempt if the name of a file has it, as all files of a checkpoint in a store of objects do; else empty."""
    return attempt if attempt and file.rsplit(".", 2)[1:-1] == [attempt] else ""


def has_step(container: Location, identity: Mapping[str, Any]) -> bool:
    """Whether a container file belongs to a checkpoint of this package, by its name or by the files beside it.

    Container files in the checkpoints of frameworks have no step: their index holds 0 for it. A kept container is of
    several steps.
    """
    if is_kept(container.name):
        return False
    ours = (container_name(identity["rank"], attempt) for attempt in ("", identity["attempt"]))
    return container.name in ours or store_of(container).exists(container.parent / FILE)


def is_fence(data: bytes) -> bool:
    """Whether the bytes of a manifest say that no checkpoint will be in its place."""
    return data == FENCE


def now() -> str:
    """The present time in the form of :attr:`Manifest.created`."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON. Its ``crc32`` covers all other fields in their canonical form."""
    fields = manifest.model_dump(mode="json", exclude_none=True)
    return (json.dumps({**fields, "crc32": _checksum(fields)}, indent=2) + "\n").encode()


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def decode(data: bytes, path: str) -> Manifest:
    """The inverse of :func:`encode`. Raises FormatError, which names ``path`` and the defect."""
    try:
        fields = json.loads(data)
        if type(fields) is not dict or type(fields.get("format")) is not int:
            raise FormatError(f"{path}: not a manifest")
        checksum = fields.pop("crc32")
        if fields["format"] not in (1, FORMAT_VERSION, WITH_KEPT):
            raise FormatError(f"{path}: a manifest of format {fields['format']!r:.40}; this reads 1, 2 and 3")
        if checksum != _checksum(fields) or encode(made := Manifest.model_validate_json(json.dumps(fields))) != data:
            raise FormatError(f"{path}: the manifest does not match its checksum")
        return made
    except ValidationError as error:
        first = error.errors()[0]
        raise FormatError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: not a manifest ({type(error).__name__}: {error})") from None


def look(path: Location) -> Entry | None:
    """Look at a checkpoint's manifest; None if it has none, and so is no checkpoint. Raises StorageError."""
    found = store_of(path).file(path / FILE)
    if found is not None and found.kind == "file" and found.nbytes <= len(FENCE):
        try:
            return None if is_fence(store_of(path).read_all(path / FILE, MAX_NBYTES)) else found
        except StorageError as error:  # whoever opens it is told
            return None if error.errno in ABSENT else found
    return found


def open(path: Location) -> Manifest:
    """Read the manifest of the checkpoint directory ``path``.

    Raises:
        CheckpointNotFoundError: ``path`` has no manifest.
        DecidedAgainstError: It has a fence, and never will have one.
        FormatError: The manifest is damaged.
        StorageError: The manifest cannot be read.
    """
    file = path / FILE
    try:
        data = store_of(file).read_all(file, MAX_NBYTES)
    except StorageError as error:
        if error.errno == errno.EFBIG:
            raise FormatError(f"{file}: too long for a manifest") from None
        refuse_missing(path, error)
        raise
    if is_fence(data):
        raise DecidedAgainstError(f"{path} is not a committed checkpoint: its {FILE} says that none will be here")
    return decode(data, str(file))


class Facts(NamedTuple):
    """What a list of checkpoints needs of a manifest. The defaults stand for one that is unreadable."""

    sequence: int | None = None
    attempt: str = ""
    metric: float | None = None


def facts_in(path: Location) -> Facts:
    """The facts in the manifest of the checkpoint directory ``path``; raises what :func:`open` does."""
    opened = open(path)
    return Facts(opened.sequence or 0, opened.attempt, opened.metric)


@functools.lru_cache(maxsize=1 << 16)
def facts_of(path: Location, version: Hashable) -> Facts:
    """As :func:`facts_in`, but cached while the file's ``version`` stays the same. No error is."""
    del version
    return facts_in(path)


def named_in(path: Location, opened: Manifest) -> list[Named]:
    """The containers that the manifest of a checkpoint directory names, in its order."""
    found = []
    for one, number in zip(opened.containers, opened.numbers, strict=True):
        identity = identity_of(number, opened.world_size, opened.step, opened.attempt)
        made = {} if one.step is None else {"step": one.step, "attempt": one.attempt}
        found.append(Named(within(path, one.file, one.folder), one.nbytes, one.index_crc32, {**identity, **made}))
    return found


def named_of(path: Location, opened: Manifest, rank: int) -> list[Named]:
    """The containers of one rank that the manifest of a checkpoint directory names: its own, then its kept one."""
    return [named for named in named_in(path, opened) if named.identity["rank"] == rank]


def identity_of(number: int, ranks: int, step: int | None, attempt: str) -> dict[str, Any]:
    """What the index of a container has for its identity. A kept one may be of an earlier step."""
    world: dict[str, Any] = {"rank": number % ranks, "world_size": ranks}
    return world if number >= ranks else {**world, "step": step, "attempt": attempt}


def files_of(path: Location, opened: Manifest) -> list[tuple[Location, int]]:
    """The files that the manifest of the checkpoint directory ``path`` names, each with its length in bytes."""
    files = [(within(path, one.file, one.folder), one.nbytes) for one in opened.containers]
    return files if opened.catalog is None else [*files, (path / opened.catalog.file, opened.catalog.nbytes)]


def within(checkpoint: Location, file: str, folder: str | None) -> Location:
    """The path of a file of a checkpoint, which lies in its directory or in a folder beside that."""
    return (checkpoint if folder is None else checkpoint.parent / folder) / file


def folder_of(file: Location, checkpoint: Location) -> str | None:
    """The folder of a file beside its checkpoint; None if it lies in the checkpoint's own."""
    return None if file.parent == checkpoint else file.parent.name


def is_of(file: Location, path: Location) -> bool:
    """Whether a file is one of the checkpoint directory ``path``, or may be a kept container that it names."""
    return file.is_relative_to(path) or (
        KEPT_FOLDER.match(file.parent.name) is not None and file.parent.parent == path.parent
    )


def refuse_missing(path: Location, error: StorageError) -> None:
    """Raise CheckpointNotFoundError if ``error`` means that ``path`` has no manifest."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        raise CheckpointNotFoundError(f"{path} is not a committed checkpoint: it has no {FILE}") from None
