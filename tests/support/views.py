"""Arrays that share memory or are laid out in an unusual way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def views() -> dict[str, Any]:
    """A table of torch, views of it, a scalar, and an array of NumPy without elements."""
    table = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
    return {
        "table": table,
        "row": table[300],
        "columns": table[:, 7:9],
        "transposed": table.t(),
        "scalar": torch.tensor(5.0),
        "empty": np.zeros((0, 4), np.int64),
    }
