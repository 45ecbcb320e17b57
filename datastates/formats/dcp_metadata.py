"""Reads ``.metadata`` of torch.distributed.checkpoint: the parts of each tensor, and the place of each part.

It is a pickle of torch's dataclasses. Classes of this module stand for them, so no code of it runs, and torch is not
needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datastates.container import pickle_policy, pickle_stand_ins
from datastates.errors import FormatError
from datastates.state import dtypes
from datastates.storage import store_of
from datastates.storage.location import Location

FILE = ".metadata"
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
"""Element types of quantized tensors. They are read as objects: their bytes do not hold scale and zero point."""
_TYPES = {*dtypes.TORCH, *_QUANTIZED}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored part of a tensor, or an object.

    Attributes:
        key: The fully qualified name of the tensor or object.
        file: The name of its file.
        offset, nbytes: Its place in the file, in bytes.
        dtype: The element type; None for an object, or a tensor of quantized elements.
        of: The shape of the tensor.
        begin, shape: The first index of the part in the tensor, and the part's shape.
        transformed: True if an extension changed the bytes that ``torch.save`` wrote, such as by compression.
    """

    key: str
    file: str
    offset: int
    nbytes: int
    dtype: str | None
    of: tuple[int, ...]
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    transformed: bool


def read_chunks(folder: Location) -> list[Chunk]:
    """Read the metadata of a checkpoint.

    Raises:
        FormatError: It is damaged, or no metadata; the message names the file.
        StorageError: It cannot be read.
    """
    path = folder / FILE
    data = store_of(path).read_all(path)
    try:
        metadata = pickle_stand_ins.read(data, _CLASSES, _constant)
        return _chunks(metadata)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: its metadata contradicts itself: {type(error).__name__}: {error}") from error


class _Fields:
    """Stands for an object of a dataclass of torch: has the attributes that the pickle gives."""

    def __init__(self, *arguments: Any) -> None:
        del arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, kind: Any) -> Any:
        value = self.state.get(name) if isinstance(getattr(self, "state", None), dict) else None
        if not isinstance(value, kind):
            raise FormatError(f"its metadata has no {name} where one must be")
        return value


class _Metadata(_Fields):
    """Stands for torch's ``Metadata``."""


class _Tensor(_Fields):
    """Stands for torch's ``TensorStorageMetadata``."""


class _Properties(_Fields):
    """Stands for torch's ``TensorProperties``, whose state is a tuple that begins with the element type."""

    @property
    def dtype(self) -> str | None:
        state = getattr(self, "state", None)
        if isinstance(state, dict):
            state = (state.get("dtype"),)
        if not isinstance(state, tuple) or not state or state[0] not in _TYPES:
            raise FormatError("its metadata has a tensor of an unknown element type")
        return None if state[0] in _QUANTIZED else str(state[0])


class _Bytes(_Fields):
    """Stands for torch's ``BytesStorageMetadata``."""


class _Chunk(_Fields):
    """Stands for torch's ``ChunkStorageMetadata``."""


class _Index(_Fields):
    """Stands for torch's ``MetadataIndex``."""


class _Storage(_Fields):
    """Stands for torch's ``_StorageInfo``."""


class _Size:
    """Stands for ``torch.Size``: makes a tuple."""

    def __new__(cls, sizes: Any = ()) -> tuple[int, ...]:  # type: ignore[misc]
        if not pickle_policy.are_sizes(sizes):
            raise FormatError("its metadata has an impossible shape")
        return tuple(sizes)


class _Ignored:
    """Stands for an object whose value does not matter."""

    def __new__(cls, *arguments: Any) -> None:  # type: ignore[misc]
        del arguments


_MODULE = "torch.distributed.checkpoint"
_CLASSES: dict[str, type] = {
    f"{_MODULE}.metadata.Metadata": _Metadata,
    f"{_MODULE}.metadata.TensorStorageMetadata": _Tensor,
    f"{_MODULE}.metadata.TensorProperties": _Properties,
    f"{_MODULE}.metadata.BytesStorageMetadata": _Bytes,
    f"{_MODULE}.metadata.ChunkStorageMetadata": _Chunk,
    f"{_MODULE}.metadata.MetadataIndex": _Index,
    f"{_MODULE}.filesystem._StorageInfo": _Storage,
    f"{_MODULE}.metadata._MEM_FORMAT_ENCODING": _Ignored,
    "torch.serialization._get_layout": _Ignored,
    "torch.Size": _Size,
}


def _constant(full: str) -> str | None:
    """The name of torch's element type ``full``, such as ``torch.float32``; None for another name."""
    name = full.removeprefix("torch.")
    return name if name in _TYPES and full != name else None


def _chunks(metadata: Any) -> list[Chunk]:
    if not isinstance(metadata, _Metadata):
        raise FormatError("it is no metadata of torch.distributed.checkpoint")
    known: dict[Any, Any] = metadata.get("state_dict_metadata", dict)
    boxes = {key: _boxes(value) for key, value in known.items() if isinstance(value, _Tensor)}
    found = []
    for index, place in metadata.get("storage_data", dict).items():
        if not isinstance(index, _Index) or not isinstance(place, _Storage):
            raise FormatError("its metadata has places that are none")
        key, value = index.get("fqn", str), known.get(index.get("fqn", str))
        where = place.get("relative_path", str), place.get("offset", int), place.get("length", int)
        if "\0" in where[0]:
            raise FormatError("its metadata names a file that cannot be")
        transformed = bool(place.state.get("transform_descriptors"))
        if isinstance(value, _Tensor):
            begin = index.state.get("offset")
            if begin is None and len(boxes[key]) == 1:
                (begin,) = boxes[key]
            if not isinstance(begin, tuple) or begin not in boxes[key]:
                raise FormatError(f"its metadata has a part of {key!r} that the tensor has not")
            dtype = value.get("properties", _Properties).dtype
            of, size = value.get("size", tuple), boxes[key][begin]
            sizes = all(map(pickle_policy.are_sizes, (of, begin, size))) and len(of) == len(begin) == len(size)
            if not sizes or any(b + n > whole for b, n, whole in zip(begin, size, of, strict=True)):
                raise FormatError(f"its metadata has a part of {key!r} of an impossible shape")
            found.append(Chunk(key, *where, dtype, of, begin, size, transformed))
        elif isinstance(value, _Bytes):
            found.append(Chunk(key, *where, None, (), (), (), transformed))
        else:
            raise FormatError(f"its metadata does not describe {key!r}")
    if lost := known.keys() - {chunk.key for chunk in found}:
        raise FormatError(f"its metadata has no place for {sorted(map(str, lost))[0]!r}")
    return found


def _boxes(tensor: _Tensor) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The shape of each part of a tensor, by the first index of the part."""
    chunks = tensor.get("chunks", list)
    if not all(isinstance(chunk, _Chunk) for chunk in chunks):
        raise FormatError("its metadata has parts that are none")
    return {chunk.get("offsets", tuple): chunk.get("sizes", tuple) for chunk in chunks}
