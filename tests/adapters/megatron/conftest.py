"""Megatron-Core's dist_checkpointing on the CPU, as each of several ranks."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SECONDS = 120
HERE = Path(__file__).parent

IMPORTED = (
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "pytest",
)

Run = Callable[..., "list[subprocess.CompletedProcess[str]]"]


@pytest.fixture
def run(ranks: Any, tmp_path: Path) -> Run:
    """Run a script, which may use all of setting.py, on ``n`` ranks: ``run(n, script, *arguments, **variables)``.

    Further options are those of ``ranks``. What a rank asserts fails the test with its output.
    """

    def start(n: int, script: str, *arguments: object, **options: Any) -> list[subprocess.CompletedProcess[str]]:
        # a persistent worker of Megatron's is spawned: it imports the script once more
        source = f"import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom setting import *\n\ndef main():\n"
        source += textwrap.indent(textwrap.dedent(script), "    ")
        source += '\nif __name__ == "__main__":\n    begin()\n    main()\n    end()\n'
        done: list[subprocess.CompletedProcess[str]]
        # killed processes leave their locks in TMPDIR; its name is short, as Megatron makes sockets there
        given = {"timeout": SECONDS, "imported": IMPORTED, "TMPDIR": str(tmp_path.parent), **options}
        done = ranks(n, source, *arguments, **given)
        return done

    return start
