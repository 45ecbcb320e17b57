"""Every module of ``torch.nn`` is saved and restored as stock does it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from dividing import divided
from nn_classes import ABSTRACT, ENTRIES
from oracle import check
from subject import Case, Subject
from torch import nn
from trained import training

CLASSES = sorted(n for n, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module))
FEW = ("BatchNorm1d", "GRU", "LazyConv1d", "MultiheadAttention", "ParameterDict", "Transformer")


def subject_of(name: str) -> Subject:
    """A module that has seen an input, as lazy ones then have parameters, and its optimizer."""
    entry = ENTRIES[name]
    module = entry.module(name)
    if any(torch.nn.parameter.is_lazy(p) for p in module.parameters()):
        module(*(make() for make in entry.inputs))
    return training(module, entry.inputs)


CASES = [Case(name, partial(subject_of, name)) for name in CLASSES if name in ENTRIES]  # an older torch lacks some


def test_every_class_has_an_entry() -> None:
    assert set(CLASSES) - ABSTRACT - set(ENTRIES) == set()


@pytest.mark.parametrize("cases", divided(CASES, FEW))
def test_modules(cases: Sequence[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)
