"""Which classes torch loads without trust: frameworks add theirs when they are imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def only_torchs_own() -> Iterator[None]:
    """None but torch's own, within the block."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(before)
