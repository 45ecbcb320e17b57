"""Encodes the header of a safetensors file. Pure functions.

A file is its header of JSON, with the header's length in eight bytes before it, and then all tensors end to end, in
row-major order: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence

from datastates.container.named_tensor import Tensor
from datastates.state.dtypes import BY_NAME, SAFETENSORS

MOST_HEADER = 100_000_000
"""Longest header in bytes that the safetensors library reads."""


def file_order(tensors: Sequence[Tensor]) -> list[int]:
    """The numbers of the tensors in the file's order: tensors with the largest elements first, then by name.

    So all are aligned, as the header's length is a multiple of eight. The safetensors library uses the same order.
    """
    return sorted(range(len(tensors)), key=lambda i: (-BY_NAME[tensors[i].dtype].itemsize, tensors[i].name))


def encode_header(tensors: Sequence[Tensor], metadata: Mapping[str, str], alignment: int = 8) -> bytes:
    """All bytes before the first tensor.

    Args:
        tensors: The tensors in the file's order.
        metadata: Further texts for the header, by name.
        alignment: Spaces pad it to a multiple of so many bytes, of 8 at least.

    Raises:
        ValueError: The header would be too long, or the format cannot hold a tensor; the message names it.
    """
    for tensor in tensors:
        if tensor.dtype not in SAFETENSORS:
            raise ValueError(f"{tensor.key!r} is of type {tensor.dtype}, which torch's reader of safetensors lacks")
        if tensor.name == "__metadata__":
            raise ValueError(f"{tensor.key!r} cannot be named '__metadata__' in safetensors: rename it")
    for name in (*(tensor.name for tensor in tensors), *metadata):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name!r} cannot be a name in safetensors, as it has no UTF-8: rename it") from None
    ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for tensor, end in zip(tensors, ends, strict=True):
        entries[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (end - tensor.nbytes, end),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    if len(text) > MOST_HEADER:
        raise ValueError(f"the header would have {len(text)} bytes, more than safetensors reads: use shards")
    return len(text).to_bytes(8, "little") + text
