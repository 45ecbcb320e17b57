"""The layout of safetensors files: what the safetensors library itself writes and reads."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from datastates._base.sizes import PAGE
from datastates.container.named_tensor import Tensor
from datastates.exporting.layouts import file_of, files_of, index_of, parse_size
from datastates.state.dtypes import BY_NAME, SAFETENSORS

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__")
FROM_BYTES = sorted(SAFETENSORS.keys() - {"float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"})
"""The types that ``safetensors.torch.load`` knows; ``load_file`` knows all."""
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(FROM_BYTES), SHAPES), max_size=8))
def test_the_library_reads_the_header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    file = file_of(
        "x", [Tensor(f"p/{name}", name, dtype, shape) for name, (dtype, shape) in tensors.items()], {}, {}, PAGE
    )
    read = load(file.literal + bytes(file.nbytes - len(file.literal)))
    assert {name: (str(t.dtype)[6:], tuple(t.shape)) for name, t in read.items()} == tensors
    for offset, tensor in zip(file.plan.data_offset.tolist(), file.tensors, strict=True):
        assert offset % BY_NAME[tensor.dtype].itemsize == 0


def test_the_order_and_the_alignment_are_those_of_the_library() -> None:
    tensors = {"b": torch.ones(3), "a": torch.ones(2), "c": torch.ones(1, dtype=torch.int64), "d": torch.ones(5).bool()}
    stock = save(tensors, metadata={"format": "pt"})
    ours = file_of("x", [Tensor(k, k, str(t.dtype)[6:], tuple(t.shape)) for k, t in tensors.items()], {}, {}, PAGE)
    assert json.loads(ours.literal[8:]) == json.loads(stock[8 : 8 + int.from_bytes(stock[:8], "little")])
    assert ours.nbytes - len(ours.literal) == len(stock) - 8 - int.from_bytes(stock[:8], "little")
    assert len(ours.literal) == PAGE


def test_shards_are_filled_in_order() -> None:
    sizes = [30, 50, 30, 200, 10]
    tensors = [Tensor(f"m/{i}", str(i), "uint8", (n,)) for i, n in enumerate(sizes)]
    files = files_of(tensors, {}, {}, 100, PAGE)
    assert [[t.name for t in file.tensors] for file in files] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [file.name for file in files] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    index = json.loads(index_of(files, {}))
    assert index["metadata"] == {"total_size": 320}
    assert index["weight_map"]["3"] == "model-00003-of-00004.safetensors"
    assert [file.name for file in files_of(tensors, {}, {}, 1000, PAGE)] == ["model.safetensors"]


def test_what_the_format_lacks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'m/w' is of type complex128, which torch's reader of safetensors lacks"):
        file_of("x", [Tensor("m/w", "w", "complex128", (1,))], {}, {}, PAGE)
    with pytest.raises(ValueError, match="'m/__metadata__' cannot be named"):
        file_of("x", [Tensor("m/__metadata__", "__metadata__", "uint8", (1,))], {}, {}, PAGE)
    for name, tied in (("w\udc80", {}), ("w", {"w\udc80": "w"})):
        with pytest.raises(ValueError, match=r"'w\\udc80' cannot be a name in safetensors, as it has no UTF-8"):
            file_of("x", [Tensor("m/w", name, "uint8", (1,))], tied, {}, PAGE)


def test_sizes_are_those_of_huggingface() -> None:
    assert [parse_size(s) for s in ("5GB", "1.5 mb", "2MiB", "700")] == [5 * 10**9, 1_500_000, 2 << 20, 700]
    for wrong in ("", "GB", "-1GB", "0", "5XB", "five"):
        with pytest.raises(ValueError, match="shard_size"):
            parse_size(wrong)
