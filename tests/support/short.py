"""Cases of a parametrized test: one runs each time, the others among the long tests, or by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(cases: Iterable[Any], rest: pytest.MarkDecorator = pytest.mark.long) -> list[Any]:
    """The cases, all but the first with a mark. A tuple is a case of several arguments."""
    one, *others = cases
    return [one, *(pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=rest) for c in others)]
