"""One export: chooses tensors, their names and files; then copies the tensors, and publishes the files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from datastates.commit.pending import Pending, publish_files
from datastates.commit.tiers import sweep_beside
from datastates.config import IoSettings
from datastates.container.digests import digest_of
from datastates.container.named_tensor import Tensor
from datastates.container.rows import place_of
from datastates.errors import FormatError, StorageError, UncertainError
from datastates.executor.make import make_small_executor
from datastates.exporting import layouts
from datastates.exporting.copying import Copier, Origin, window_nbytes
from datastates.exporting.layouts import File
from datastates.exporting.request import ExportRequest, is_file, is_torch, place_of_partial, refuse_existing
from datastates.formats import recognise
from datastates.formats.format import Opened
from datastates.reading.tensors import Metadata, Tensors
from datastates.restoring.renaming import Renames, as_text, renamed
from datastates.restoring.restored import of_classes, shortened
from datastates.state.dtypes import FLOATS
from datastates.state.keys import is_inner, shown
from datastates.storage import Folders, folders_of, store_of
from datastates.storage.location import Face, Location, PathLike

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""Error numbers of a rename to a name that is taken: by a file, a folder with content, a file for a folder."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        source: The name of the source's format.
        path: The file or the folder that was written; a string for an address in a store.
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
    path: Face
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: dict[str, str]
    objects: tuple[str, ...]
    unproven: tuple[str, ...]
    metadata: tuple[str, ...]
    cast: tuple[str, ...]


def export(
    source: PathLike,
    request: ExportRequest,
    settings: IoSettings,
    progress: Callable[[int, int], object] | None,
    advice: str = recognise.IN_PYTHON,
) -> Exported:
    """Write the tensors of a checkpoint; see :func:`datastates.export`.

    Args:
        source: The checkpoint, or the directory that it is in.
        request: The options of the export.
        settings: How bytes move.
        progress: Called with the number of bytes written, and the number of all bytes.
        advice: As for :func:`datastates.formats.recognise.opened`.
    """
    with recognise.opened(source, request.step, advice) as found:
        return _export(found, request, settings, progress or (lambda *_: None))


def _export(
    found: Opened, request: ExportRequest, settings: IoSettings, progress: Callable[[int, int], object]
) -> Exported:
    stored = found.tensors
    target = request.target
    refuse_existing(target)
    if not stored.keys:
        raise FormatError(f"{stored.path}: {_why_nothing(stored)}")
    chosen = choose(stored.keys, request.keys)
    names = names_of(chosen, request.rename)
    origins, tied = _origins(stored, chosen)
    tensors = [
        Tensor(key, names[key], _type(origins[key].row.dtype.name, request.dtype), origins[key].row.global_shape)
        for key in chosen
        if key not in tied
    ]
    named = {names[key]: names[kept] for key, kept in tied.items()}
    block = window_nbytes([(origins[tensor.key].row.dtype.name, tensor.dtype) for tensor in tensors])
    planned, omitted = _plan(request, tensors, named, stored.metadata, block)
    total = sum(file.nbytes for file in planned)
    made = make_small_executor(settings, max(file.nbytes for file in planned))
    new = _pending if isinstance(store_of(target), Folders) else _objects
    with contextlib.closing(made), new(target) as place:
        copier = Copier(origins, made, direct_io=settings.direct_io, progress=lambda nbytes: progress(nbytes, total))
        for file in planned:
            copier.copy(place(file.name), file)
        if len(planned) > 1:
            index = layouts.index_of(planned, stored.metadata.index)
            store_of(target).upload(place(layouts.INDEX), iter([index]), len(index))
    providers = {key.partition("/")[0] for key in chosen}
    return Exported(
        found.format,
        target.face,
        tuple(file.name for file in planned),
        len(tensors),
        total,
        named,
        tuple(key for key in stored.objects() if key.partition("/")[0] in providers or matches(key, request.keys)),
        tuple(tensor.key for tensor in tensors if origins[tensor.key].digest is None and tensor.nbytes),
        omitted,
        tuple(tensor.key for tensor in tensors if tensor.dtype != origins[tensor.key].row.dtype.name),
    )


def _plan(
    request: ExportRequest,
    tensors: Sequence[Tensor],
    tied: Mapping[str, str],
    metadata: Metadata,
    block: int,
) -> tuple[list[File], tuple[str, ...]]:
    """Lay out the files of an export. Returns them, and the names of metadata that they have no place for."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.index.items()}
    texts |= metadata.texts
    target = request.target
    if is_torch(target):
        lost = *(name for name in texts if name != "format"), *metadata.differing
        return [layouts.torch_file_of(target.name, tensors, tied, block)], lost
    if is_file(target):
        return [layouts.file_of(target.name, tensors, tied, texts, block)], metadata.differing
    planned = layouts.files_of(tensors, tied, metadata.texts, request.shard_nbytes, block)
    if len(planned) == 1:  # there is no index
        planned = layouts.files_of(tensors, tied, texts, request.shard_nbytes, block)
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
def _objects(target: Location) -> Iterator[Callable[[str], Location]]:
    """Yield what gives an object its final place, the one before being made. If the export fails, they are removed."""
    folder, given = target.parent if is_file(target) else target, list[Location]()

    def place(name: str) -> Location:
        given.append(folder / name)
        return given[-1]

    try:
        yield place
    except BaseException as error:
        if not isinstance(error, UncertainError):  # the last one is not there, or another program's
            del given[-1:]
        with contextlib.suppress(StorageError):
            store_of(folder).discard(given)
        if isinstance(error, StorageError) and error.errno == errno.EEXIST:
            refuse_existing(target)
        raise


@contextlib.contextmanager
def _pending(target: Location) -> Iterator[Callable[[str], Location]]:
    """Yield what gives a file its place in a partial folder, beside the target or in it, and publish the files.

    If the export fails, the folder is removed, with parents that were made for it.
    """
    place = place_of_partial(target)
    sweep_beside(place)
    missing = [folder for folder in place.parents if not folders_of(folder).exists(folder)]
    with contextlib.ExitStack() as after_failure:
        after_failure.callback(_remove_empty, missing)
        pending = Pending(place)
        after_failure.callback(pending.abandon)
        pending.begin()
        yield pending.file
        _publish(pending, target)
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
            pending.publish()
            return
        folder = target.parent if is_file(target) else target
        # the last one is the index, where there are several
        publish_files([(written, folder / written.name) for written in pending.files], replace=False)
        pending.abandon()
    except StorageError as error:
        if error.errno in _TAKEN:
            refuse_existing(target)
        raise


ALONE = "tensor"
"""The name of a tensor that is all of a checkpoint."""


def choose(keys: Iterable[str], globs: Sequence[str]) -> list[str]:
    """The full keys that match any of some globs, written as in a shell, as they are or as people are shown them.

    The keys stay in their order.

    Raises:
        ValueError: A glob matches nothing; the message names it.
    """
    known = list(keys)
    for glob in globs:
        if not any(matches(key, [glob]) for key in known):
            raise ValueError(f"keys: no array of the checkpoint matches {glob!r}")
    return [key for key in known if matches(key, globs)]


def matches(key: str, globs: Sequence[str]) -> bool:
    """Whether a full key, or the key as people are shown it, matches any of some globs."""
    return any(fnmatchcase(key, glob) or fnmatchcase(shown(key), glob) for glob in globs)


def names_of(keys: Sequence[str], renames: Renames) -> dict[str, str]:
    """The name of each tensor in the export, by full key.

    The name is the full key without its provider if all keys belong to one provider, else the full key. An array inside
    a tensor has a name that people can read, unless another tensor has it; see :func:`~datastates.state.keys.shown`. A
    tensor that is all of a checkpoint has no key, and is named :data:`ALONE`. Then the first of the renames that
    matches a name changes it.

    Raises:
        ValueError: A rename matches nothing, two tensors would get one name, or one would get an empty name.
    """
    heads = {key.partition("/")[0] for key in keys}
    lone = len(heads) == 1 and not any(map(is_inner, heads))
    several = Counter(map(shown, keys))
    used = set()
    names: dict[str, str] = {}
    keys_of: dict[str, str] = {}
    for key in keys:
        name = key if several[shown(key)] > 1 else shown(key)
        name = (name.partition("/")[2] or name if lone else name) or ALONE
        name, by = renamed(name, renames)
        used.add(by)
        if not name:
            raise ValueError(f"rename: {key!r} would get an empty name")
        if name in keys_of:
            raise ValueError(f"rename: {keys_of[name]!r} and {key!r} would both be named {name!r}")
        names[key], keys_of[name] = name, key
    for old in renames:
        if old not in used:
            raise ValueError(f"rename: no name of an exported tensor matches {as_text(old)!r}")
    return names
