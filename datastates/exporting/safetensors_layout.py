"""The layout of safetensors files and of Hugging Face's folders of them. Pure functions.

A folder of several files has an index, as ``save_pretrained`` of transformers writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from datastates._base.sizes import PAGE
from datastates.container.named_tensor import Tensor
from datastates.container.safetensors_header import encode_header, file_order
from datastates.exporting.frame import File
from datastates.planning import write

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
