"""Cases of a parametrized test: one runs each time, the others among the long tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the first marked as long. A tuple is a case of several arguments."""
    one, *others = cases
    return [one, *(pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.long) for c in others)]
