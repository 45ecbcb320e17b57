"""The JSON file's entry: host_cache_size acts like any setting."""

from __future__ import annotations

import pytest

from datastates.adapters.deepspeed import DeepSpeedSettings
from datastates.errors import SettingsError


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
