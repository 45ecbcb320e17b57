"""Modules that ``torch.ao`` quantizes are saved and restored as stock does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dividing import divided
from oracle import check
from quantized_modules import ABSTRACT, DYNAMIC, ELSEWHERE, NO_STATE, OBSERVERS, STATIC, WITH_PARAMETERS, cases, classes
from subject import Case
from torch.ao import quantization
from torch.ao.nn import quantized
from torch.ao.nn.quantized import dynamic

FEW = ("static Linear", "dynamic LSTM", "observer HistogramObserver")


def test_every_class_has_an_entry() -> None:
    assert classes(quantized) - {*STATIC, *WITH_PARAMETERS, *ELSEWHERE} == set()
    assert classes(dynamic) - set(DYNAMIC) == set()
    assert classes(quantization) - {*OBSERVERS, *ABSTRACT, *NO_STATE} == set()


@pytest.mark.parametrize("cases", divided(cases(), FEW))
def test_quantized(cases: Sequence[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)
