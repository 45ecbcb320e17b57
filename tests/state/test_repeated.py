"""An unchanged layout is recognized; a change that its addresses do not show is, too."""

from __future__ import annotations

import pytest

from datastates.state.repeated import Describer

torch = pytest.importorskip("torch")


def test_an_unchanged_layout_is_used_again() -> None:
    describer = Describer()
    values = [torch.ones(4), torch.zeros(2, 3)]
    describer.describe(["a", "b"], values, [True, True])
    known = describer.known
    assert known is not None
    values[0] += 1
    again = describer.again(["a", "b"], values, [True, True])
    assert again is not None
    assert again.layout is known.layout


def test_a_number_that_becomes_negated_in_place_is_described_anew() -> None:
    describer = Describer()
    complex_memory = torch.tensor([1 + 2j])
    filling = torch.ones(4)
    describer.describe(["filling", "imaginary"], [filling, complex_memory.imag], [True, True])
    assert describer.again(["filling", "imaginary"], [filling, complex_memory.imag], [True, True]) is not None
    negated = complex_memory.conj().imag
    assert negated.data_ptr() == complex_memory.imag.data_ptr()
    assert describer.again(["filling", "imaginary"], [filling, negated], [True, True]) is None
    shards = describer.describe(["filling", "imaginary"], [filling, negated], [True, True])
    assert shards[1].source.item() == -2
