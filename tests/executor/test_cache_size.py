"""The size of the host cache where the settings give none."""

from __future__ import annotations

from pathlib import Path

import pytest

import datastates as ds
from datastates.config import IoSettings
from datastates.executor import make


@pytest.mark.parametrize(("ranks", "share"), [(None, 1), ("", 1), ("0", 1), ("8", 8), ("many", 1)])
def test_a_quarter_of_what_is_free_is_shared_by_the_ranks_of_one_machine(
    ranks: str | None, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATASTATES_HOST_CACHE")
    monkeypatch.setattr(make, "host_memory", lambda: 64 << 20)
    monkeypatch.setattr(make, "Executor", lambda settings, nbytes: nbytes)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert make.make_executor(IoSettings.of({"block": "1MiB"})) == (16 << 20) // share


def test_a_machine_without_memory_still_gets_two_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DATASTATES_HOST_CACHE")
    monkeypatch.setattr(make, "host_memory", lambda: 0)
    settings = IoSettings.of({"block": "1MiB"})
    assert settings.host_cache == "auto"
    executor = make.make_executor(settings)
    executor.close()
    with ds.Checkpointer(tmp_path, block="1MiB") as checkpointer:
        assert checkpointer.settings.host_cache == "auto"
