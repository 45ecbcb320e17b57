"""One export: chooses tensors, their names and files; then copies the tensors, and publishes the files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datastates.commit.directory_tier import sweep_beside
from datastates.commit.pending import Pending, publish_files
from datastates.container.digests import digest_of
from datastates.container.named_tensor import Tensor
from datastates.container.rows import place_of
from datastates.errors import FormatError, StorageError
from datastates.executor.executor import Executor
from datastates.exporting import safetensors_layout as layout
from datastates.exporting import torch_layout
from datastates.exporting.copying import Copier, Origin, window_nbytes
from datastates.exporting.frame import File
from datastates.exporting.naming import choose, matches, names_of
from datastates.exporting.target import is_file, is_torch, place_of_partial, refuse_existing
from datastates.reading.casting import FLOATS
from datastates.reading.tensors import Metadata, Tensors
from datastates.restoring.renaming import Renames
from datastates.restoring.restored import of_classes, shortened
from datastates.storage import folders_of
from datastates.storage.location import Location

CASTS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The types that floating-point tensors can be cast to: the usual short names, and torch's."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Error numbers of a rename to a name that is taken: by a file, a folder with content, a file for a folder."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        source: The name of the source's format.
        path: The file or the folder that was written.
        files: Names of the files in it; for a single file, its own name.
        tensors: Number of tensors.
        nbytes: Bytes of all files.
        tied: For each name that shares its tensor with another name, that name. A safetensors file has the tensor
            under the other name only, a torch file under both.
        objects: Full keys of objects, which are no tensors, that were left out: objects that were asked for by key, and
            objects of the providers whose tensors were exported.
        unproven: Full keys of tensors that have no digest to compare with. Their bytes match the checksums of a source
            that has checksums of its chunks, as this package's checkpoints do.
        metadata: Names of metadata of safetensors that was left out: a file for torch has no place for it, or the files
            of the source differ in it.
        cast: Full keys of tensors that were cast to another type.
    """

    source: str
    path: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: dict[str, str]
    objects: tuple[str, ...]
    unproven: tuple[str, ...]
    metadata: tuple[str, ...]
    cast: tuple[str, ...]


def cast_type(dtype: object) -> str | None:
    """Torch's name of the type to cast to, given as ``"bf16"``, ``"bfloat16"`` or ``torch.bfloat16``; None for None.

    Raises:
        ValueError: Tensors cannot be cast to it.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = CASTS.get(name, name)
    if name not in CASTS.values():
        raise ValueError(f"dtype: {dtype} is none of {', '.join([*CASTS, *CASTS.values()])}")
    return name


def export(
    stored: Tensors,
    source: str,
    target: Location,
    executor: Callable[[int], Executor],
    *,
    keys: Sequence[str],
    rename: Renames,
    dtype: str | None,
    shard_nbytes: int | None,
    direct_io: bool,
    progress: Callable[[int, int], object],
) -> Exported:
    """Write the tensors of a checkpoint to ``target``; see :func:`datastates.export`.

    Args:
        stored: The checkpoint.
        source: The name of its format.
        target: The file or folder to make.
        executor: Makes an executor for windows of so many bytes.
        keys: Globs of full keys.
        rename: New names.
        dtype: Torch's name of the type that floating-point tensors are cast to; None casts nothing.
        shard_nbytes: Most bytes of tensors in a file of a folder; None for the default.
        direct_io: Whether to write past the page cache.
        progress: Called with the number of bytes written, and the number of all bytes.
    """
    refuse_existing(target)
    if not stored.keys:
        raise FormatError(f"{stored.path}: {_why_nothing(stored)}")
    chosen = choose(stored.keys, keys)
    names = names_of(chosen, rename)
    origins, tied = _origins(stored, chosen)
    tensors = [
        Tensor(key, names[key], _type(origins[key].row.dtype.name, dtype), origins[key].row.global_shape)
        for key in chosen
        if key not in tied
    ]
    named = {names[key]: names[kept] for key, kept in tied.items()}
    block = window_nbytes([(origins[tensor.key].row.dtype.name, tensor.dtype) for tensor in tensors])
    planned, omitted = _plan(target, tensors, named, stored.metadata, shard_nbytes, block)
    total = sum(file.nbytes for file in planned)
    made = executor(max(file.nbytes for file in planned))
    with contextlib.closing(made), _pending(place_of_partial(target)) as pending:
        copier = Copier(origins, made, direct_io=direct_io, progress=lambda nbytes: progress(nbytes, total))
        for file in planned:
            copier.copy(pending.file(file.name), file)
        if len(planned) > 1:
            folders_of(target).create(pending.file(layout.INDEX), layout.index_of(planned, stored.metadata.index))
        _publish(pending, target)
    providers = {key.partition("/")[0] for key in chosen}
    return Exported(
        source,
        Path(target),
        tuple(file.name for file in planned),
        len(tensors),
        total,
        named,
        tuple(key for key in stored.objects() if key.partition("/")[0] in providers or matches(key, keys)),
        tuple(tensor.key for tensor in tensors if origins[tensor.key].digest is None and tensor.nbytes),
        omitted,
        tuple(tensor.key for tensor in tensors if tensor.dtype != origins[tensor.key].row.dtype.name),
    )


def _plan(
    target: Location,
    tensors: Sequence[Tensor],
    tied: Mapping[str, str],
    metadata: Metadata,
    shard_nbytes: int | None,
    block: int,
) -> tuple[list[File], tuple[str, ...]]:
    """Lay out the files of an export. Returns them, and the names of metadata that they have no place for."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.index.items()}
    texts |= metadata.texts
    if is_torch(target):
        lost = *(name for name in texts if name != "format"), *metadata.differing
        return [torch_layout.file_of(target.name, tensors, tied, block)], lost
    if is_file(target):
        return [layout.file_of(target.name, tensors, tied, texts, block)], metadata.differing
    most = shard_nbytes or layout.parse_size("5GB")
    planned = layout.files_of(tensors, tied, metadata.texts, most, block)
    if len(planned) == 1:  # there is no index
        planned = layout.files_of(tensors, tied, texts, most, block)
    return planned, metadata.differing


def _why_nothing(stored: Tensors) -> str:
    """The error message for a checkpoint without any tensor to export."""
    found = ((key, entry.classes()) for key, entry in stored.objects().items())
    whole = [of_classes(key, kinds) for key, kinds in found if kinds]
    return shortened(["there is no tensor to export", *whole], "; ")


def _type(stored: str, wanted: str | None) -> str:
    return wanted if wanted is not None and stored in FLOATS else stored


def _origins(stored: Tensors, keys: Sequence[str]) -> tuple[dict[str, Origin], dict[str, str]]:
    """The origin of each tensor by full key; and the tied keys: each with the earlier key of the same memory."""
    origins: dict[str, Origin] = {}
    tied: dict[str, str] = {}
    firsts: dict[object, str] = {}
    for key, (row, sources) in zip(keys, stored.whole(keys), strict=True):
        place = row.global_shape, *((str(source.path), place_of(one), str(one.part)) for source, one in sources)
        if sources and (first := firsts.setdefault(place, key)) != key:
            tied[key] = first
            continue
        contributed = stored.digest(key)
        nbytes = row.dtype.itemsize * math.prod(row.global_shape)
        origins[key] = Origin(row, sources, None if contributed is None else digest_of(contributed, nbytes))
    return origins, tied


@contextlib.contextmanager
def _pending(place: Location) -> Iterator[Pending]:
    """Yield a partial folder beside a path. If the export fails, it is removed, with parents that were made for it."""
    sweep_beside(place)
    missing = [folder for folder in place.parents if not folders_of(folder).exists(folder)]
    with contextlib.ExitStack() as after_failure:
        after_failure.callback(_remove_empty, missing)
        pending = Pending(place)
        after_failure.callback(pending.abandon)
        pending.begin()
        yield pending
        after_failure.pop_all()


def _remove_empty(folders: Iterable[Location]) -> None:
    """Remove the folders that exist and are empty, the deepest first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folders_of(folder).remove_empty(folder)


def _publish(pending: Pending, target: Location) -> None:
    """Give the written files their names; raises FileExistsError if one of the names was taken meanwhile."""
    try:
        if not is_file(target) and pending.directory.parent == target.parent:
            pending.publish(lambda: target)
            return
        folder = target.parent if is_file(target) else target
        # the last one is the index, where there are several
        publish_files([(written, folder / written.name) for written in pending.files], replace=False)
        pending.abandon()
    except StorageError as error:
        if error.errno in _TAKEN:
            refuse_existing(target)
        raise
