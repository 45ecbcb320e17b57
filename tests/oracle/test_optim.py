"""Every optimizer and scheduler of torch is saved and restored as stock does it, with its model and alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from dividing import divided
from optim_classes import ABSTRACT_SCHEDULERS, OPTIONS, SCHEDULERS, optimizer_cases, scheduler_cases
from oracle import check
from subject import Case
from torch import optim
from torch.optim import lr_scheduler

FEW = ("Adam-plain", "AdamW-amsgrad=True-foreach=True", "LBFGS-max_iter=3-history_size=4", "SparseAdam-plain")
FEW += ("LambdaLR", "SequentialLR", "ReduceLROnPlateau")


def subclasses(module: ModuleType, base: type) -> set[str]:
    return {name for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, base)}


def test_every_class_has_an_entry() -> None:
    assert subclasses(optim, optim.Optimizer) - {"Optimizer"} - set(OPTIONS) == set()
    found = subclasses(lr_scheduler, lr_scheduler.LRScheduler) | {"SWALR"}
    assert found - ABSTRACT_SCHEDULERS - set(SCHEDULERS) == set()


@pytest.mark.parametrize("cases", divided([*optimizer_cases(), *scheduler_cases()], FEW))
def test_optimizers_and_schedulers(cases: Sequence[Case], tmp_path: Path) -> None:
    check(cases, tmp_path)
