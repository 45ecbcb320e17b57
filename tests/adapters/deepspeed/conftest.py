"""Training with DeepSpeed on the CPU, as each of several ranks."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed_ranks import RANKS

HERE = Path(__file__).parent

Train = Callable[..., "list[subprocess.CompletedProcess[str]]"]


def _train(ranks: Any) -> Train:
    def run(n: int, script: str, *arguments: object, **options: Any) -> list[subprocess.CompletedProcess[str]]:
        begin = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom training import *\nbegin()\n"
        source = begin + textwrap.dedent(script) + "\nend()\n"
        done: list[subprocess.CompletedProcess[str]]
        done = ranks(n, source, *arguments, **{**RANKS, **options})
        return done

    return run


@pytest.fixture
def train(ranks: Any) -> Train:
    """Run a script, which may use all of training.py, on ``n`` ranks: ``train(n, script, *arguments, **variables)``.

    Further options are those of ``ranks``. What a rank asserts fails the test with its output.
    """
    return _train(ranks)


@pytest.fixture(scope="module")
def module_train(module_ranks: Any) -> Train:
    """As ``train``, for runs that all tests of a module share."""
    return _train(module_ranks)
