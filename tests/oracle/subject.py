"""What is trained, saved and restored in a test, and how a test begins with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Subject:
    """Objects that are trained together.

    Attributes:
        objects: Those with ``state_dict`` and ``load_state_dict``, by the names they are saved under.
        train: One step; returns its outputs and its loss.
    """

    objects: dict[str, Any]
    train: Callable[[], object]


@dataclass(frozen=True, eq=False)
class Case:
    """One kind of thing to train.

    Attributes:
        name: Its name in the test's report.
        make: Makes what is saved.
        live: Makes what is restored into, where it differs from what was saved.
        gated: Whether torch optimizers make all updates. Else a test calls the gate before each step.
        cast: Whether ours is asked to convert types, which stock does unasked.
    """

    name: str
    make: Callable[[], Subject]
    live: Callable[[], Subject] | None = None
    gated: bool = True
    cast: bool = False

    def __str__(self) -> str:
        return self.name


def seed(number: int) -> None:
    """Seed all generators of the process."""
    torch.default_generator.manual_seed(number)  # torch.manual_seed() notes its stack for each kind of device
    random.seed(number)
    np.random.seed(number)


def made(make: Callable[[], Subject], number: int, steps: int = 0) -> Subject:
    """A new subject of a seed, after some steps; all of the same seed and steps are equal."""
    seed(number)
    subject = make()
    for i in range(steps):
        trained(subject, 1000 * number + i)
    return subject


def trained(subject: Subject, number: int) -> object:
    """Do one step with the numbers of a seed; returns what it gave."""
    seed(number)
    return subject.train()
