"""Values that ``torch.load`` builds without trust in classes, each of which may be a leaf of a state dict."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Make = Callable[[], Any]


def _quantized(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(shape), 0.1, 0 if dtype is torch.qint32 else 3, dtype)


def _by_channel(dtype: torch.dtype, *, floats: bool = False) -> torch.Tensor:
    points = torch.randint(0, 5, (3,))
    return torch.quantize_per_channel(torch.randn(3, 4), torch.rand(3), points.float() if floats else points, 0, dtype)


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _parts() -> list[torch.Tensor]:
    whole = _quantized(torch.qint8, 6, 4)
    return [whole[:2], whole[2:], whole]


def _twice(value: Any) -> list[Any]:
    return [value, value]


QUANTIZED: dict[str, Make] = {
    **{str(dtype): lambda d=dtype: _quantized(d, 3, 4) for dtype in (torch.qint8, torch.quint8, torch.qint32)},
    **{
        f"{dtype} by channel": lambda d=dtype: _by_channel(d, floats=True) for dtype in (torch.quint4x2, torch.quint2x4)
    },
    "by channel": lambda: _by_channel(torch.qint8),
    "by channel with floats": lambda: _by_channel(torch.quint8, floats=True),
    "quantized, a part": lambda: _quantized(torch.qint8, 6, 4)[2:4],
    "quantized, transposed": lambda: _quantized(torch.qint8, 6, 4).t(),
    "quantized, empty": lambda: _quantized(torch.qint8, 0, 4),
    "quantized, parts of one": _parts,
    "quantized, twice": lambda: _twice(_quantized(torch.qint8, 6, 4)),
    "quantized parameter": lambda: nn.Parameter(_quantized(torch.qint8, 6, 4), requires_grad=False),
    "quantized with an attribute": lambda: _with(_quantized(torch.qint8, 6, 4), note=3),
}

TENSORS: dict[str, Make] = {
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "parameter with attributes": lambda: _with(nn.Parameter(torch.randn(3)), note=[1, torch.ones(2)]),
    "buffer": lambda: nn.Buffer(torch.randn(3)),
    "tensor with an attribute": lambda: _with(torch.randn(3), note="x"),
    "leaf of a graph": lambda: torch.randn(3).requires_grad_(),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "conjugate": lambda: torch.randn(3, dtype=torch.cfloat).conj(),
    "COO": lambda: torch.randn(3, 4).relu().to_sparse(),
    "COO, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (3, 3)),
    "COO, hybrid": lambda: torch.randn(3, 4, 2).to_sparse(1),
    "COO, empty": lambda: torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), torch.empty(0), (3, 3)),
    "CSR": lambda: torch.randn(3, 4).relu().to_sparse_csr(),
    "CSC": lambda: torch.randn(3, 4).relu().to_sparse_csc(),
    "BSR": lambda: torch.randn(4, 4).to_sparse_bsr((2, 2)),
    "BSC": lambda: torch.randn(4, 4).to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "meta parameter": lambda: nn.Parameter(torch.empty(3, 4, device="meta")),
    **{
        str(dtype): lambda d=dtype: torch.zeros(3, dtype=torch.uint8).view(d)
        for dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.bits8)
    },
    **{str(dtype): lambda d=dtype: torch.ones(3, dtype=d) for dtype in (torch.uint16, torch.complex32)},
    "storage": lambda: torch.randn(3).untyped_storage(),
    "typed storage": lambda: torch.randn(3)._typed_storage(),
    "storage of quantized numbers": lambda: _quantized(torch.qint8, 3, 4)._typed_storage(),
    "storage, twice": lambda: _twice(torch.randn(3).untyped_storage()),
}

VALUES: dict[str, Any] = {
    **{f"value {value}": value for value in (torch.bfloat16, torch.float8_e4m3fn, torch.qint8, torch.quint4x2)},
    **{f"value {value}": value for value in (torch.uint3, torch.int4, torch.bits8, torch.complex32)},
    **{
        f"value {value}": value
        for value in (torch.strided, torch.sparse_csr, torch.device("cpu"), torch.device("cuda:1"))
    },
    **{f"value {value}": value for value in (torch.per_tensor_affine, torch.per_channel_affine_float_qparams)},
    **{f"value {value}": value for value in (torch.per_channel_symmetric, torch.Size([1, 2]), torch.Size([]))},
    **{f"class {kind.__name__}": kind for kind in (torch.Tensor, nn.Parameter, torch.Size, set, OrderedDict, Counter)},
    "wide integer": 2**80,
    "complex": 1 + 2j,
    "bytes": b"abc\x00\xff",
    "bytearray": bytearray(b"abc\xff"),
    "no bytearray": bytearray(),
    "set": {1, "a", 2.5},
    "counter": Counter({"a": 2, 1: 2.5}),
    "keys": {torch.float32: 1, (1, 2): 3, 2.5: 1, None: 2, torch.device("cpu"): 1, True: 0},
    "metadata": _with(OrderedDict(a=1, b=torch.ones(2)), _metadata={"": {"version": 1}}),
}

LEAVES: dict[str, Make] = {**QUANTIZED, **TENSORS, **{name: lambda v=value: v for name, value in VALUES.items()}}
"""By name, what makes one."""
