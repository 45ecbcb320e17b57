"""Lets a suite change a framework's module when it is imported, in every process that Python starts for the suite."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Changing(importlib.abc.MetaPathFinder):
    """Finds the module of a suite as the other finders do, and changes it once it is executed."""

    def __init__(self, suite: Any, variant: str) -> None:
        self._suite = suite
        self._variant = variant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._suite.MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self._suite.change(module, self._variant)

        loader.exec_module = executed
        return spec


if "DATASTATES_SUITE" in os.environ:
    _suite = importlib.import_module(os.environ["DATASTATES_SUITE"])
    if os.environ["DATASTATES_SUITE_VARIANT"] != _suite.VARIANTS[0]:
        sys.meta_path.insert(0, _Changing(_suite, os.environ["DATASTATES_SUITE_VARIANT"]))
