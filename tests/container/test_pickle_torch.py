"""What torch builds of untrusted arguments: kernels of torch do not check all of them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from datastates.container import pickle_torch  # noqa: E402 - torch is optional here
from datastates.errors import FormatError  # noqa: E402

ROWS = torch.arange(9.0)


def longs(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int64)


NESTED: dict[str, tuple[Any, ...]] = {
    "no tensors": (ROWS, (2, 3), (3, 1), 0),
    "too few parts": (ROWS, longs([2, 3]), longs([3, 1])),
    "a size beyond the buffer": (ROWS, longs([4, 3]), longs([3, 1]), longs(0)),
    "an offset beyond the buffer": (ROWS, longs([2, 3]), longs([3, 1]), longs(4)),
    "a stride beyond the buffer": (ROWS, longs([2, 3]), longs([7, 1]), longs(0)),
    "a negative offset": (ROWS, longs([2, 3]), longs([3, 1]), longs(-1)),
    "a negative stride": (ROWS, longs([2, 3]), longs([3, -1]), longs(2)),
    "sizes that wrap around": (ROWS, longs([2**61, 8]), longs([8, 1]), longs(0)),
    "fewer strides": (ROWS, longs([2, 3], [1, 3]), longs([3, 1]), longs(0, 6)),
    "sizes without a row": (ROWS, longs(2, 3), longs(3, 1), longs(0)),
    "sizes of another type": (ROWS, longs([2, 3]).double(), longs([3, 1]), longs(0)),
    "a buffer of rows": (ROWS.view(3, 3), longs([2, 3]), longs([3, 1]), longs(0)),
}


@pytest.mark.parametrize("parts", NESTED.values(), ids=NESTED)
def test_nested_tensor_beyond_its_buffer_is_refused(parts: tuple[Any, ...]) -> None:
    with pytest.raises(FormatError, match="a nested tensor"):
        pickle_torch.nested(*parts)


def jagged_parts(**others: Any) -> dict[str, Any]:
    plain = {"values": ROWS.view(3, 3), "offsets": longs(0, 2, 3), "lengths": None, "_ragged_idx": 1}
    return {**plain, "_metadata_cache": {}, "requires_grad": False, **others}


JAGGED: dict[str, Any] = {
    "no mapping": (1, 2),
    "another part": jagged_parts(more=1),
    "no tensor": jagged_parts(values=[1.0]),
    "offsets beyond the values": jagged_parts(offsets=longs(0, 2, 4)),
    "negative offsets": jagged_parts(offsets=longs(-1, 2, 3)),
    "offsets that go back": jagged_parts(offsets=longs(0, 3, 2)),
    "no offsets": jagged_parts(offsets=longs()),
    "offsets of floats": jagged_parts(offsets=torch.tensor([0.0, 3.0])),
    "lengths beyond the values": jagged_parts(lengths=longs(1, 2)),
    "negative lengths": jagged_parts(lengths=longs(-1, 1)),
    "fewer lengths": jagged_parts(lengths=longs(1)),
    "a dimension that is not there": jagged_parts(_ragged_idx=3),
    "other lengths than it has": jagged_parts(_metadata_cache={"max_seqlen": torch.empty(9, 0)}),
}


@pytest.mark.parametrize("arguments", JAGGED.values(), ids=JAGGED)
def test_jagged_tensor_beyond_its_values_is_refused(arguments: Any) -> None:
    with pytest.raises(FormatError, match="a jagged tensor"):
        pickle_torch.jagged(arguments)


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize(("kind", "elements"), [("QUInt8Storage", 12), ("QUInt4x2Storage", 6), ("QUInt2x4Storage", 3)])
def test_quantized_tensor_beyond_its_storage_is_refused(kind: str, elements: int) -> None:
    form = kind, 0, (3, 4), (4, 1), (torch.per_channel_affine, torch.ones(3), torch.zeros(3), 0), False
    assert pickle_torch.quantized(torch.zeros(elements, dtype=torch.uint8), *form).shape == (3, 4)
    with pytest.raises(FormatError, match="beyond its storage"):
        pickle_torch.quantized(torch.zeros(elements - 1, dtype=torch.uint8), *form)
