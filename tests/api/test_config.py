"""Settings: sizes, environment, and refusals that name the field."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import datastates as ds
from datastates.adapters.dcp.save.writer import WriterOptions, WriterSettings
from datastates.config import IoOptions, IoSettings, Options, RankOptions, RankSettings, Settings
from datastates.errors import SettingsError, StorageError
from datastates.files.settings import FileOptions, FileSettings, FolderOptions, FolderSettings
from datastates.kept import Keep


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(1 << 30, 1 << 30), ("67108864", 64 << 20), ("8GiB", 8 << 30), ("64.5 MiB", 129 << 19), ("64MB", 64_000_000)],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert IoSettings.of({"host_cache": text}).host_cache == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "8 GiBs", "-1", "1e9", "8gib", "64Mbit", "1,073,741,824", "8.GiB", "16GiB/2", "8 GiB per rank"),
        *("automatic", None, 1.5, 1.0, True, b"64MiB"),
    ],
)
def test_what_is_no_size(text: object) -> None:
    for field in ("host_cache", "block", "device_cache"):
        with pytest.raises(SettingsError, match=f"^{field}: .* is not a size: use bytes, or .* GiB") as raised:
            IoSettings.of({field: text})
        assert str(raised.value).count(field) == 1


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (IoOptions, IoSettings),
        (RankOptions, RankSettings),
        (Options, Settings),
        (WriterOptions, WriterSettings),
        (FileOptions, FileSettings),
        (FolderOptions, FolderSettings),
    ],
)
def test_type_checkers_know_every_field(options: Any, settings: type[IoSettings]) -> None:
    assert set(options.__annotations__) == set(settings.model_fields)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"host_cach": "1GiB"}, "host_cach"),
        ({"host_cache": "lots"}, "host_cache"),
        ({"host_cache": "1MiB"}, "host_cache"),
        ({"block": 5000}, "block"),
        ({"block": 4096}, "block"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"io_backend": "aio"}, "io_backend"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": 5}, "keep_every"),
        ({"keep_best": 0}, "keep_best"),
        ({"best_mode": "lowest"}, "best_mode"),
        ({"on_error": "ignore"}, "on_error"),
        ({"max_in_flight": -1}, "max_in_flight"),
    ],
)
def test_refusals_name_the_field(options: dict[str, object], field: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=field):
        ds.Checkpointer(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_the_settings_say_what_is_kept() -> None:
    assert Settings.of({}).keeps == [Keep()]
    assert Settings.of({"keep_best": 3, "keep_every": 5}).keeps == [Keep(None, 5, 3)]
    tier = {"path": "far", "keep_best": 3}
    assert Settings.of({"keep_last": 2, "tiers": [tier, "further"], "best_mode": "max"}).keeps == [
        *(Keep(2, mode="max"), Keep(best=3, mode="max"), Keep(mode="max"))
    ]
    with pytest.raises(SettingsError, match="keep_every: nothing is deleted without"):
        Settings.of({"tiers": [{"path": "far", "keep_every": 3}]})


def test_a_host_cache_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="host_cache") as caught:  # wider than addresses of 47 bits
        ds.Checkpointer(tmp_path, host_cache="200TB", block="1GiB")
    assert caught.value.errno == errno.ENOMEM


def test_every_field_has_a_default_a_description_and_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, field in Settings.model_fields.items():
        assert not field.is_required()
        assert field.description
        monkeypatch.setenv(f"DATASTATES_{name.upper()}", "nonsense")
        if name == "tiers":  # it is a path
            assert [str(tier.path) for tier in Settings.of({}).tiers] == ["nonsense"]
        else:
            with pytest.raises(SettingsError, match=f"{name} \\(from DATASTATES_{name.upper()}\\)"):
                Settings.of({})
        monkeypatch.delenv(f"DATASTATES_{name.upper()}")


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASTATES_QUEUE_DEPTH", "5")
    monkeypatch.setenv("DATASTATES_AUTO_GATE", "false")
    assert Settings.of({}).queue_depth == 5
    assert Settings.of({}).auto_gate is False
    assert Settings.of({"queue_depth": 6}).queue_depth == 6
