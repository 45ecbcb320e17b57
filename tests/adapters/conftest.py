"""What the tests of adapters share. Where a framework is not installed its tests are skipped, and say so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FRAMEWORKS = {
    "accelerate": ("accelerate", "accelerate"),
    "deepspeed": ("deepspeed", "DeepSpeed"),
    "lightning": ("lightning", "Lightning"),
    "megatron": ("megatron.core", "Megatron-Core"),
    "torchtitan": ("torchtitan", "torchtitan"),
    "transformers": ("transformers", "transformers"),
}
"""For each folder of tests, the module that they need, and its name in messages."""


def _is_installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return found is not None and found.origin is not None  # without an origin it is a folder of tests, not the package


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {HERE / folder: name for folder, (module, name) in FRAMEWORKS.items() if not _is_installed(module)}
    for item in items:
        if (name := missing.get(item.path.parent)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"{name} is not installed: its tests did NOT run"))


@pytest.fixture(scope="session")
def said() -> Callable[[subprocess.CompletedProcess[str]], dict[str, Any]]:
    """The values that a rank has said, by word."""

    def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"word"')]
        return {line["word"]: line["value"] for line in lines}

    return read
