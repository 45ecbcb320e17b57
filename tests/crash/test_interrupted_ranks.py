"""Two ranks, of which signals interrupt one in turn at any time: both can open, save and restore again at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("interrupting_ranks.py")


@pytest.mark.by_hand
def test_two_ranks_of_which_signals_interrupt_one(tmp_path: Path, ranks: Any) -> None:
    pytest.importorskip("torch")
    done = ranks(2, PROGRAM, tmp_path / "c", 20, timeout=300)
    assert [d.stdout for d in done] == ["", ""], [d.stderr[-4000:] for d in done]
