"""Random trees of modules, and random optimizers, are saved and restored as stock does it."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from oracle import STEPS, check
from random_modules import Node, subject_of, trees
from random_optimizers import Spec, pairs
from subject import Case, made

SOME = st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 5)))
"""The numbers of the features that what is saved, or what it is restored into, lacks."""
MODULES = st.lists(st.tuples(trees(), SOME, SOME, st.booleans()), min_size=3, max_size=6)
OPTIMIZERS = st.lists(pairs(), min_size=3, max_size=6)

same_each_time = partial(settings, derandomize=True, database=None, phases=[Phase.generate])
"""No shrinking: an example is several cases, of which the message names the one that fails."""


def is_usable(case: Case) -> bool:
    """Whether both kinds of objects can be trained, and give a state."""
    try:
        for make in (case.make, case.live or case.make):
            for obj in made(make, 1, 2 * STEPS).objects.values():
                obj.state_dict()
    except Exception:  # the objects' own code may raise anything
        return False
    return True


def checked(cases: list[Case]) -> None:
    usable = [case for case in cases if is_usable(case)]
    with tempfile.TemporaryDirectory() as folder:
        check(usable, Path(folder))


def check_modules(drawn: list[tuple[Node, frozenset[int], frozenset[int], bool]]) -> None:
    cases = []
    for i, (tree, saved, live, adam) in enumerate(drawn):
        note(f"{i}: {tree}, saved without {set(saved)}, live without {set(live)}")
        makes = [partial(subject_of, tree.without(numbers), adam) for numbers in (saved, live)]
        cases.append(Case(f"{i}", *makes, cast=True))
    checked(cases)


def check_optimizers(drawn: list[tuple[Spec, Spec]]) -> None:
    for i, pair in enumerate(drawn):
        note(f"{i}: {pair}")
    checked([Case(f"{i}", saved.subject, live.subject, cast=True) for i, (saved, live) in enumerate(drawn)])


@same_each_time(max_examples=2)
@given(MODULES)
def test_some_modules(drawn: list[tuple[Node, frozenset[int], frozenset[int], bool]]) -> None:
    check_modules(drawn)


@pytest.mark.by_hand
@same_each_time(max_examples=40)
@given(MODULES)
def test_many_modules(drawn: list[tuple[Node, frozenset[int], frozenset[int], bool]]) -> None:
    check_modules(drawn)


@same_each_time(max_examples=2)
@given(OPTIMIZERS)
def test_some_optimizers(drawn: list[tuple[Spec, Spec]]) -> None:
    check_optimizers(drawn)


@pytest.mark.by_hand
@pytest.mark.long
@same_each_time(max_examples=40)
@given(OPTIMIZERS)
def test_many_optimizers(drawn: list[tuple[Spec, Spec]]) -> None:
    check_optimizers(drawn)
