"""Modules that are used only where the user has imported them."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str) -> Any:
    """A module that has been imported; None where it has not."""
    return sys.modules.get(module)
