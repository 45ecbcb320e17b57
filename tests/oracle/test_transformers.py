"""Models of transformers, of many families, are saved and restored as stock does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dividing import divided
from oracle import check
from subject import Case

pytest.importorskip("transformers")

from transformers_families import cases

FEW = ("LlamaForCausalLM",)


@pytest.mark.parametrize("cases", divided(cases(), FEW, pytest.mark.by_hand))
def test_families(cases: Sequence[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)
