"""Values to save by torch.save, and their comparison with what was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from datastates.state import keys


class Own:
    """A class that only trust builds."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8, bias=False))
    model[1].weight = torch.nn.Parameter(model[0].weight.t())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    base = torch.arange(20.0)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": [base, base[5:], base.view(4, 5).t()],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "numpy": np.arange(3),
        "expanded": torch.ones(1).expand(1000, 7),
        "half": torch.ones(3, dtype=torch.float16),
        "new": torch.ones(3, dtype=torch.uint32),
        "odd/name": {0: torch.zeros(1), "0": torch.ones(1), "": torch.ones(2)},
        "nothing": {},
        "step": 5,
        "sparse": torch.eye(2).to_sparse(),
    }


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in pairs for k, v in flat(item, keys.join(prefix, key)).items()}
    return {prefix: value}


def equal(ours: Any, stock: Any) -> bool:
    """Whether two values are the same, with the types of all parts, bit by bit."""
    if type(ours) is not type(stock):
        return False
    if isinstance(stock, torch.Tensor):
        form = [(t.dtype, t.shape, t.is_quantized, t.is_conj(), t.is_neg(), t.requires_grad) for t in (ours, stock)]
        return form[0] == form[1] and repr(ours) == repr(stock)
    if isinstance(stock, dict):
        return list(ours) == list(stock) and all(equal(ours[key], stock[key]) for key in stock)
    if isinstance(stock, np.ndarray):
        same = ours.dtype == stock.dtype and ours.strides == stock.strides
        return same and ours.flags.writeable == stock.flags.writeable and bool((ours == stock).all())
    return bool(ours.tolist() == stock.tolist()) if isinstance(stock, torch.TypedStorage) else bool(ours == stock)


ROWS = torch.arange(12.0).reshape(3, 4)
KINDS: dict[str, Callable[[], Any]] = {
    "module": lambda: torch.nn.Linear(2, 2).state_dict(),
    "bytes": lambda: {"b": b"x", "none": b"", "array": bytearray(b"abc"), "many": b"y" * 70_000},
    "sets": lambda: {"s": {1, "a"}, "f": frozenset([1, (2,)]), "none": set()},
    "numbers": lambda: {"huge": 1 << 20_000, "less": -1 << 70, "complex": 1 + 2j, "text": "\u00e9" * 300},
    "many": lambda: {"lists": [[] for _ in range(20_000)], "tuples": [(i,) for i in range(9000)]},
    "numpy": lambda: {"c": np.arange(6.0).reshape(2, 3), "f": np.ones((2, 3), order="F"), "none": np.zeros((0, 3))},
    "numpy, turned": lambda: {
        "t": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
        "read": np.frombuffer(b"ab", np.uint8),
    },
    "quantized": lambda: {"q": torch.quantize_per_tensor(ROWS, 0.1, 3, torch.qint8)},
    "quantized, a part": lambda: {"q": torch.quantize_per_tensor(ROWS, 0.1, 3, torch.qint32)[1:, ::2]},
    "quantized by channel": lambda: {
        "q": torch.quantize_per_channel(ROWS, torch.ones(3) / 10, torch.zeros(3, dtype=torch.long), 0, torch.quint8)
    },
    "conjugate": lambda: {"c": torch.ones(2, dtype=torch.complex64).conj(), "n": torch._neg_view(ROWS)},
    "storages": lambda: {"typed": torch.FloatStorage([1, 2]), "untyped": torch.ones(3).untyped_storage()},
}
