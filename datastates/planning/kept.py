"""Chooses the buffers that go into a kept container. Pure functions."""

from __future__ import annotations

import numpy as np

from datastates._base.columns import U64, Bools
from datastates._base.sizes import LARGE_RECORD

_LEAST = 8
"""A kept container has at least this share of the state's bytes, as a divisor."""
_MORE = 2
"""It is made anew if this share of it, as a divisor, could be added. For less it stays: much may change seldom."""


def choose_kept(nbytes: U64, unchanged: Bools, kept: Bools) -> Bools:
    """Choose the buffers of the kept container; none if it would not be worth a file.

    The present ones stay as long as none of them changes, unless much more could be kept: a container is linked as a
    whole, and each choice of others is written once.

    Args:
        nbytes: The length of each buffer.
        unchanged: Whether it is as the last checkpoint has it.
        kept: Whether the last checkpoint has it in its kept container.
    """
    able = unchanged & (nbytes >= LARGE_RECORD)
    more = int(nbytes[able & ~kept].sum())
    if kept.any() and not (kept & ~unchanged).any() and more * _MORE <= int(nbytes[kept].sum()):
        return kept
    return able if int(nbytes[able].sum()) * _LEAST >= int(nbytes.sum()) else np.zeros_like(able)
