"""An installed framework that is newer than the newest one tried is told of once, and works."""

from __future__ import annotations

import importlib.metadata

import pytest

from datastates.adapters.shared import tried


@pytest.mark.parametrize(
    ("installed", "is_told"),
    [("1.9.3", False), ("1.10.0", False), ("1.10.0+cpu", False), ("1.10.1rc1", True), ("2.0", True)],
)
def test_a_newer_version_is_told_of_once(
    installed: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(tried.NEWEST, "framework", "1.10.0")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: installed)
    tried.warn_of_untried.cache_clear()
    for _ in range(2):
        tried.warn_of_untried("framework")
    tried.warn_of_untried.cache_clear()
    assert [installed in message for message in caplog.messages] == [True] * is_told


def test_a_framework_under_another_name_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    tried.warn_of_untried("a package that is not installed")
    assert not caplog.messages
