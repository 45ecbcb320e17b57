"""The JSON file's entry: the documented table is the model's, and host_cache_size acts like any setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastates.adapters.deepspeed import DeepSpeedSettings
from datastates.errors import SettingsError

PAGE = Path(__file__).parents[3] / "docs" / "deepspeed.md"


def test_the_documented_table_is_the_model() -> None:
    rows = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert list(rows) == list(DeepSpeedSettings.model_fields)
    for name, field in DeepSpeedSettings.model_fields.items():
        assert f"| `DATASTATES_{name.upper()}` |" in rows[name]
        assert f"| {field.description} |" in rows[name]


def test_host_cache_size_is_gib_of_host_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASTATES_HOST_CACHE", raising=False)
    assert DeepSpeedSettings.of_entry({"host_cache_size": 0.5}).host_cache == 1 << 29
    monkeypatch.setenv("DATASTATES_HOST_CACHE_SIZE", "0.25")
    assert DeepSpeedSettings.of_entry({}).host_cache == 1 << 28
    assert DeepSpeedSettings.of_entry({"host_cache_size": 0.5}).host_cache == 1 << 29
    assert DeepSpeedSettings.of_entry({"host_cache": "1GiB"}).host_cache == 1 << 30
    monkeypatch.setenv("DATASTATES_HOST_CACHE_SIZE", "much")
    with pytest.raises(SettingsError, match="host_cache_size: 'much' is not a number of GiB"):
        DeepSpeedSettings.of_entry({})
