"""JAX's coordination service for the tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from coordination import Coordination


@pytest.fixture(scope="module")
def coordination() -> Iterator[Coordination]:
    """A service that the tests of a module share."""
    made = Coordination()
    yield made
    made.end()


@pytest.fixture
def another_coordination() -> Coordination:
    """A service that the test ends."""
    return Coordination()
