"""What the tests of adapters share. Where a framework is not installed its tests are skipped, and say so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import servers

from datastates.storage import register, stores
from datastates.storage.buckets import Buckets

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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a server with an empty bucket."""
    pytest.importorskip("obstore")
    with servers.server("localbucket", tmp_path_factory.mktemp("server")) as environment:
        yield environment


@pytest.fixture
def bucket(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty place in a bucket of a server, which this process and those that it starts find."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("s3", Buckets(patience=5))
    return f"{servers.ROOTS['localbucket']}/{tmp_path.name}"
