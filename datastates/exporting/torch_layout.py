"""The layout of a file that ``torch.load`` opens: a flat dict of tensors by name. Pure functions.

The file is an archive as ``torch.save`` writes it, with the pickle in front. It has no index of this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from datastates._base.columns import U32
from datastates.container import data_pkl, zip_frames
from datastates.container.named_tensor import Tensor
from datastates.container.records import Records
from datastates.exporting.frame import File
from datastates.planning import write
from datastates.state import strides
from datastates.state.dtypes import BY_NAME, pickled
from datastates.state.shards import StoredArray


def file_of(name: str, tensors: Sequence[Tensor], tied: Mapping[str, str], block: int) -> File:
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
