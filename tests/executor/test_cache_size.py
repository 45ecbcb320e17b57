"""The size of the host cache where the settings give none."""

from __future__ import annotations

from pathlib import Path

import pytest

import datastates as ds
from datastates.config import IoSettings
from datastates.executor import cache_size
from datastates.executor.make import make_executor


def test_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(cache_size, "host_memory", lambda: 32_000)
    assert cache_size.automatic_cache() == 8_000


@pytest.mark.parametrize(("ranks", "share"), [("", 1), ("0", 1), ("8", 8), ("many", 1)])
def test_the_ranks_of_one_machine_share(ranks: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "host_memory", lambda: 32_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cache_size.automatic_cache() == 8_000 // share


def test_a_machine_without_memory_still_gets_two_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DATASTATES_HOST_CACHE")
    monkeypatch.setattr(cache_size, "host_memory", lambda: 0)
    settings = IoSettings.of({"block": "1MiB"})
    assert settings.host_cache == "auto"
    executor = make_executor(settings)
    executor.close()
    with ds.Checkpointer(tmp_path, block="1MiB") as checkpointer:
        assert checkpointer.settings.host_cache == "auto"
