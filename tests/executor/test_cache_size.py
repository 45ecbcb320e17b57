"""The size of the host cache where the settings give none."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import datastates as ds
from datastates.config import IoSettings
from datastates.executor import cache_size
from datastates.executor.make import make_executor


def test_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(cache_size, "_CGROUP", Path("/nowhere"))
    assert cache_size.automatic_cache() == pytest.approx(psutil.virtual_memory().available / 4, rel=0.2)


@pytest.mark.parametrize(("ranks", "share"), [("", 1), ("0", 1), ("8", 8), ("many", 1)])
def test_the_ranks_of_one_machine_share(ranks: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "_available", lambda: 32_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cache_size.automatic_cache() == 8_000 // share


@pytest.mark.parametrize(("limit", "available"), [("max", None), (str(5 << 20), 1 << 20), (str(1 << 20), 0)])
def test_a_control_group_limits_it(
    limit: str, available: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = next((x[3:] for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::")), "/")
    group = tmp_path / own.lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{4 << 20}\n")
    monkeypatch.setattr(cache_size, "_CGROUP", tmp_path)
    if available is None:
        assert cache_size._available() > 5 << 20
    else:
        assert cache_size._available() == available


def test_a_machine_without_memory_still_gets_two_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DATASTATES_HOST_CACHE")
    monkeypatch.setattr(cache_size, "_available", lambda: 0)
    settings = IoSettings.of({"block": "1MiB"})
    assert settings.host_cache == "auto"
    executor = make_executor(settings)
    executor.close()
    with ds.Checkpointer(tmp_path, block="1MiB") as checkpointer:
        assert checkpointer.settings.host_cache == "auto"
