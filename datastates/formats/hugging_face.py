"""Reads folders of Hugging Face's tools: one file of a model's weights, or several files and their index."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datastates._base.cached import cached_property
from datastates.errors import FormatError, StorageError
from datastates.formats import safetensors_file, torch_file
from datastates.formats.foreign import Foreign, refuse_repeated
from datastates.formats.foreign_file import ForeignFile
from datastates.formats.format import Problem
from datastates.formats.seen import Seen
from datastates.formats.torch_file import TorchFile
from datastates.formats.torch_parts import HEAD
from datastates.reading.tensors import Metadata
from datastates.storage import store_of
from datastates.storage.location import Location

NAME = "a folder of Hugging Face weights"
_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of files with all weights. The name of an index of several files begins with one of these."""
_INDEX = ".index.json"
_MOST_INDEX = 256 << 20
"""Longest index in bytes that is read: one of a million tensors has a hundred megabytes."""


def recognises(seen: Seen) -> bool:
    """Whether a folder has weights, as safetensors or as the older files of ``torch.save``."""
    return _found(seen) is not None


def open(path: Location) -> Foreign:
    """Open a folder of weights.

    Raises:
        FormatError: A file is damaged, or two files have one tensor; the message names the file.
        StorageError: A file is missing or cannot be read; the message names it.
    """
    first = _found(Seen(path))
    assert first is not None
    if not first.name.endswith(_INDEX):
        return Foreign(NAME, path, [_open_file(first)])
    weights, metadata = _read_index(first)
    names = list(dict.fromkeys(weights.values()))
    missing = [name for name in names if not store_of(path).is_file(path / name)]
    if missing:
        what = f"{first} names files that are missing: {', '.join(missing)}"
        raise StorageError(errno.ENOENT, "open", str(path / missing[0]), what)
    files = [_open_file(path / name) for name in names]
    refuse_repeated(path, files)
    held = {name: {*file.shards.by_key, *file.composed} for name, file in zip(names, files, strict=True)}
    lacking = [Problem(first, key, f"is not in {name}") for key, name in weights.items() if key not in held[name]]
    return Indexed(NAME, path, files, lacking, metadata)


class Indexed(Foreign):
    """The weights of a model in several files, with an index."""

    def __init__(
        self,
        format: str,
        path: Location,
        files: Sequence[ForeignFile],
        lacking: Sequence[Problem],
        index_metadata: Mapping[str, Any],
    ) -> None:
        """Take the opened files.

        Args:
            format: The name of the format.
            path: The folder.
            files: The files.
            lacking: A problem for each tensor that only the index names: the rest is readable.
            index_metadata: The metadata in the index.
        """
        super().__init__(format, path, files)
        self._lacking = lacking
        self._index_metadata = index_metadata

    @cached_property
    def metadata(self) -> Metadata:
        """The texts in the headers of its files, and what the index says beside the sum of their sizes."""
        return replace(super().metadata, index={k: v for k, v in self._index_metadata.items() if k != "total_size"})

    def verify(self, progress: Callable[[int], object]) -> Iterator[Problem]:
        """Verify as :meth:`Foreign.verify` does, and name the tensors that the files lack."""
        yield from super().verify(progress)
        yield from self._lacking


def _open_file(path: Location) -> ForeignFile:
    is_torch = torch_file.is_beginning(store_of(path).head(path, HEAD))
    return TorchFile(path) if is_torch else safetensors_file.open_file(path)


def _found(seen: Seen) -> Location | None:
    """Path of the index, or of the only file of weights; else None. Files without an index are several checkpoints."""
    for known in (one for file in _FILES for one in (file + _INDEX, file)):
        if seen.has(known):
            return seen.path / known
    indexes = [name for name in seen.names if name.endswith(f"{safetensors_file.SUFFIX}{_INDEX}")]
    files = [name for name in seen.names if name.endswith(safetensors_file.SUFFIX) and seen.has(name)]
    return seen.path / indexes[0] if len(indexes) == 1 else seen.path / files[0] if len(files) == 1 else None


def _read_index(path: Location) -> tuple[dict[str, str], dict[str, Any]]:
    """Read an index: the file name of each tensor, by key, and the metadata in it."""
    index = read_object(path, "weight_map", "index of weights", most=_MOST_INDEX)
    weights, metadata = index["weight_map"], index.get("metadata")
    names = weights.values() if isinstance(weights, dict) else ()
    if not names or not all(isinstance(name, str) and Location(name).name == name for name in names):
        raise FormatError(f"{path} is no index of weights: an index names files beside it, and at least one")
    return dict(weights), metadata if isinstance(metadata, dict) else {}


def read_object(path: Location, field: str, what: str, *, most: int) -> dict[str, Any]:
    """The outermost object in a JSON file.

    Args:
        path: The file.
        field: The name of a field that it must have.
        what: The name of this kind of file, for messages.
        most: Longest file in bytes that is accepted.

    Raises:
        FormatError: The file is longer, is no JSON, or has no such field; the message names it.
        StorageError: It cannot be read.
    """
    store = store_of(path)
    if (nbytes := store.length(path)) > most:
        raise FormatError(f"{path} is no {what}: it has {nbytes} bytes, too many")
    try:
        found: dict[str, Any] = json.loads(store.read(path, 0, nbytes))
        found[field]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} is no {what}: {type(error).__name__}: {error}") from error
    return found
