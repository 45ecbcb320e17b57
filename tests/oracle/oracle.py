"""Saves and restores both ways, stock's and ours, and compares all that there is after it, and after more training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from portrait import Portrait, differences, portrait
from subject import Case, Subject, made, trained

import datastates as ds
from datastates.errors import ProviderError
from datastates.providers import from_stateful

SAVED, FRESH, USED = 1, 2, 3
"""Seeds: of what is saved, and of the two kinds of objects that it is restored into."""
STEPS = 2
"""Steps before the first save, and after a restore."""


def check(cases: Sequence[Case], folder: Path) -> None:
    """Save twice, restore into new objects and into used ones, together and each kind of object alone; train on.

    All cases share one checkpoint, as a save and a restore take longer than such small objects do.

    Raises:
        AssertionError: Ours and stock differ; a line for each difference.
    """
    saved = {case: made(case.make, SAVED, STEPS) for case in cases}
    _save(saved, folder)
    kinds = list(dict.fromkeys(name for subject in saved.values() for name in subject.objects))
    Restored(folder, cases, kinds, seed=FRESH, steps=0, step=2).compare()
    Restored(folder, cases, kinds, seed=USED, steps=STEPS + 1, step=1).compare()
    for kind in kinds:
        several = [case for case, subject in saved.items() if kind in subject.objects and len(subject.objects) > 1]
        if several:
            Restored(folder, several, [kind], seed=FRESH, steps=0, step=2).compare()


def _save(saved: Mapping[Case, Subject], folder: Path) -> None:
    """Save two steps both ways while training goes on. Saving changes nothing."""
    apart = {case: made(case.make, SAVED, STEPS) for case in saved}
    providers = [
        from_stateful(_name(case, kind), obj)
        for case, subject in saved.items()
        for kind, obj in subject.objects.items()
    ]
    with ds.Checkpointer(folder / "ours") as checkpointer:
        for step in (1, 2):
            for case in saved:
                states = [
                    {kind: obj.state_dict() for kind, obj in s.objects.items()} for s in (saved[case], apart[case])
                ]
                torch.save(states[0], _file(folder, case, step))
            checkpointer.snapshot(providers, step=step)
            if not all(case.gated for case in saved):
                checkpointer.gate()
            for case in saved:
                outcomes = [trained(each[case], step) for each in (saved, apart)]
                _assert_alike(f"{case} while it is saved", *map(_of, outcomes))
        checkpointer.wait()
    for case in saved:
        _assert_alike(f"{case} after it was saved", _of(saved[case].objects), _of(apart[case].objects))


@dataclass
class Restored:
    """What one step of a checkpoint is restored into, twice: by ours and by stock.

    Attributes:
        folder: Where both have saved.
        cases: What is restored.
        kinds: The names of the objects that are restored; the others stay as they are.
        seed, steps: How the objects are made.
        step: The step of the checkpoint.
    """

    folder: Path
    cases: Sequence[Case]
    kinds: Sequence[str]
    seed: int
    steps: int
    step: int
    ours: dict[Case, Subject] = field(default_factory=dict)
    stock: dict[Case, Subject] = field(default_factory=dict)

    def compare(self) -> None:
        """Restore both ways, and compare the objects then, and after more training."""
        for case in self.cases:
            for each in (self.ours, self.stock):
                each[case] = made(case.live or case.make, self.seed, self.steps)
            _assert_alike(f"{case} before a restore", _of(self.ours[case].objects), _of(self.stock[case].objects))
        fitting: dict[tuple[bool, bool], list[Case]] = {}
        for case in self.cases:
            refused, is_safe = self._restore_stock(case)
            if refused is None:
                fitting.setdefault((is_safe, case.cast), []).append(case)
            else:
                self._refuse(case, refused, is_safe)
        for (is_safe, cast), cases in fitting.items():
            self._restore_ours(cases, is_safe, cast)
            for case in cases:
                self._compare(case)

    def _compare(self, case: Case) -> None:
        ours, stock, what = self.ours[case], self.stock[case], self._shown(case)
        _assert_alike(f"after the restore of {what}", _of(ours.objects), _of(stock.objects))
        for i in range(STEPS):
            outcomes = [_attempt(each, i) for each in (ours, stock)]
            _assert_alike(f"in step {i} after the restore of {what}", *map(_of, outcomes))
        _assert_alike(f"after training on from {what}", _of(ours.objects), _of(stock.objects))

    def _refuse(self, case: Case, refused: Exception, is_safe: bool) -> None:
        """Ours raises where stock does. What it refuses by comparing, it changes nothing for, or what stock changes."""
        before = _of(self.ours[case].objects)
        try:
            self._restore_ours([case], is_safe, case.cast)
        except ProviderError:  # the object's own code refused: by then others are restored, as the message says
            return
        except Exception:
            after = _of(self.ours[case].objects)
            if differences(after, before):
                _assert_alike(f"both refused {self._shown(case)}", after, _of(self.stock[case].objects))
            return
        raise AssertionError(f"{self._shown(case)}: stock raises {refused!r}, ours nothing")

    def _restore_stock(self, case: Case) -> tuple[Exception | None, bool]:
        """The error of ``load_state_dict``, if any, and whether torch loads the file without trust in classes."""
        file = _file(self.folder, case, self.step)
        try:
            states, is_safe = torch.load(file, weights_only=True), True
        except Exception:  # it names a class
            states, is_safe = torch.load(file, weights_only=False), False
        for kind in self._of(case):
            try:
                self.stock[case].objects[kind].load_state_dict(states[kind])
            except Exception as error:
                return error, is_safe
        return None, is_safe

    def _restore_ours(self, cases: Sequence[Case], is_safe: bool, cast: bool) -> None:
        objects = {_name(case, kind): self.ours[case].objects[kind] for case in cases for kind in self._of(case)}
        providers = [from_stateful(name, obj) for name, obj in objects.items()]
        ds.restore(providers, self.folder / "ours", step=self.step, trust=() if is_safe else "all", cast=cast)

    def _of(self, case: Case) -> list[str]:
        return [kind for kind in self.ours[case].objects if kind in self.kinds]

    def _shown(self, case: Case) -> str:
        into = "used" if self.steps else "new"
        return f"{case}, {' and '.join(self._of(case))} of step {self.step} into {into} objects"


def _name(case: Case, kind: str) -> str:
    return f"{case.name}.{kind}"


def _file(folder: Path, case: Case, step: int) -> Path:
    return folder / f"stock-{case.name}-{step}.pt"


def _attempt(subject: Subject, number: int) -> object:
    try:
        return trained(subject, number)
    except Exception as error:  # a loaded state may not fit, with stock as with ours
        return repr(error)


def _of(value: Any) -> Portrait:
    return portrait(value if isinstance(value, dict) else {"outcome": value})


def _assert_alike(when: str, ours: Portrait, stock: Portrait) -> None:
    found = differences(ours, stock)
    assert not found, "\n".join([f"{when}, {len(found)} parts differ:", *found[:20]])
