"""The layouts of files that an export makes. Pure functions.

A folder of several safetensors files has an index, as ``save_pretrained`` of transformers writes it. A file for
``torch.load`` is a flat dict of tensors by name: an archive as ``torch.save`` writes it, with the pickle in front, and
without an index of this package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base.columns import U32
from datastates._base.sizes import PAGE
from datastates.container import data_pkl, zip_frames
from datastates.container.named_tensor import Tensor
from datastates.container.records import Records
from datastates.container.safetensors_header import encode_header, file_order
from datastates.planning import write
from datastates.planning.plans import WritePlan
from datastates.state import strides
from datastates.state.dtypes import BY_NAME, pickled
from datastates.state.shards import StoredArray


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """One file of an export.

    Attributes:
        name: Its name.
        tensors: Its tensors: the sources of the plan.
        plan: The places of the tensors. The file is written extent by extent.
        literal: The bytes between the tensors, end to end.
        encode_tail: Encodes the bytes after the plan's end, given the CRC-32 of each tensor as written.
        tail_nbytes: Length of these bytes.
    """

    name: str
    tensors: Sequence[Tensor]
    plan: WritePlan
    literal: bytes
    encode_tail: Callable[[U32], bytes] = lambda crcs: b""
    tail_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Length of the file in bytes."""
        return self.plan.end + self.tail_nbytes


INDEX = "model.safetensors.index.json"
"""The name of the index of several files."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str) -> int:
    """The number of bytes that a size such as ``"5GB"`` (10**9) or ``"512MiB"`` (2**20) means.

    Raises:
        ValueError: It is no size, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise ValueError(f"shard_size: {text!r} is no size such as '5GB' or '512MiB'")
    return size


def files_of(
    tensors: Sequence[Tensor], tied: Mapping[str, str], texts: Mapping[str, str], shard_nbytes: int, block: int
) -> list[File]:
    """Distribute tensors over the safetensors files of a folder.

    They stay in order. A file begins where a tensor would make the one before longer than ``shard_nbytes``, header
    aside, as in ``huggingface_hub``. A longer tensor has a file of its own.

    Args:
        tensors: The tensors.
        tied: For each name that shares its tensor with another name, that other name.
        texts: Further metadata for each file, by name.
        shard_nbytes: Most bytes of tensors in a file.
        block: Longest extent in bytes.

    Raises:
        ValueError: A header would be too long, or a tensor has a type that the format lacks.
    """
    groups: list[list[Tensor]] = [[]]
    room = shard_nbytes
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = shard_nbytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if len(groups) == 1:
        return [file_of("model.safetensors", groups[0], tied, texts, block)]
    count = len(groups)
    return [
        file_of(f"model-{number:05}-of-{count:05}.safetensors", group, tied, texts, block)
        for number, group in enumerate(groups, start=1)
    ]


def file_of(
    name: str, tensors: Sequence[Tensor], tied: Mapping[str, str], texts: Mapping[str, str], block: int
) -> File:
    """Lay tensors out in one safetensors file.

    The metadata names tied tensors as ``safetensors.torch.save_model`` does. The tensors begin on a page, so that
    tensors of whole pages can share their blocks with the checkpoint. Raises as :func:`files_of` does.
    """
    here = {tensor.name for tensor in tensors}
    ties = {name: kept for name, kept in tied.items() if kept in here and name != "format"}
    metadata = {"format": "pt", **texts, **ties}
    ordered = [tensors[i] for i in file_order(tensors)]
    header = encode_header(ordered, metadata, PAGE)
    sizes = np.array([tensor.nbytes for tensor in ordered], np.uint64)
    return File(name, ordered, write.plan_dense_write(sizes, range(len(ordered)), len(header), block), header)


def index_of(files: Sequence[File], metadata: Mapping[str, Any]) -> bytes:
    """Encode the index of several files, which names the file of each tensor, as JSON, with further metadata."""
    weights = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": weights}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def torch_file_of(name: str, tensors: Sequence[Tensor], tied: Mapping[str, str], block: int) -> File:
    """Lay tensors out in one file, each with its own storage. A tensor of a type that torch lacks becomes its bytes.

    Args:
        name: The name of the file.
        tensors: The tensors.
        tied: For each name that shares its tensor with another name, that other name. Both get the same storage.
        block: Longest extent in bytes.
    """
    tensors = [replace(tensor, dtype=pickled(BY_NAME[tensor.dtype]).name) for tensor in tensors]
    sizes = np.array([tensor.nbytes for tensor in tensors], np.uint64)
    eager = np.zeros(len(tensors), np.uint8)
    record = np.argsort(write.file_order(sizes, eager)).tolist()
    arrays = {tensor.name: _stored(tensor, number) for tensor, number in zip(tensors, record, strict=True)}
    pickle = data_pkl.encode_arrays(arrays | {name: arrays[kept] for name, kept in tied.items()})
    small = ((zip_frames.PICKLE_NAME, pickle), *zip_frames.CONSTANTS)
    leading, entries = zip_frames.encode_small(small, 0)
    room = zip_frames.header_nbytes(len(tensors))
    room[0] += len(leading)
    plan = write.plan_write(sizes, eager, room, block)
    planned = Records.of(plan)
    header_offset = planned.header_offset.copy()
    header_offset[0] = len(leading)
    records = replace(planned, header_offset=header_offset)

    def encode_tail(crcs: U32) -> bytes:
        directory = entries + zip_frames.encode_directory(replace(records, crc=crcs[plan.order]))
        ending = zip_frames.encode_ending(len(small) + len(records), plan.end, len(directory), b"")
        return directory + ending

    literal = b"".join((leading, zip_frames.encode_frames(records)))
    return File(name, tensors, plan, literal, encode_tail, len(encode_tail(np.zeros(len(tensors), np.uint32))))


def _stored(tensor: Tensor, record: int) -> StoredArray:
    elements = int(np.prod(tensor.shape, dtype=np.int64))
    return StoredArray(str(record), tensor.dtype, 0, tensor.shape, strides.row_major(tensor.shape), elements)
