"""Modules that are used only where the user has imported them."""

from __future__ import annotations

import sys
from types import ModuleType


def loaded(module: str) -> ModuleType | None:
    return sys.modules.get(module)
