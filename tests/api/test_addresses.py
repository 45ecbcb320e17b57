"""Addresses that no store serves are refused: as a path, one would name a folder in the working directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.cli import commands
from datastates.providers import HostTensorProvider

ADDRESSES = [
    "oss://bucket/run",
    "swift://bucket/run",
    "hf://org/model",
    "file:///tmp/run",
    "abfs+x://a@b/c",
    Path("oss://b"),
]
CALLS: dict[str, Callable[[Any], Any]] = {
    "Checkpointer": ds.Checkpointer,
    "snapshot": lambda path: ds.snapshot([HostTensorProvider("s", {"t": np.ones(1)})], path),
    "restore": lambda path: ds.restore([], path),
    "load": ds.load,
    "open": ds.open,
}


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ADDRESSES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_an_address_is_refused(call: str, address: Any) -> None:
    with pytest.raises(
        ValueError, match=r"is an address, and no store is registered for [a-z+0-9]+: \(registered: abfs:, "
    ):
        CALLS[call](address)


@pytest.mark.parametrize("command", [["ls"], ["inspect"], ["verify"], ["diff", "/tmp"]], ids=lambda c: c[0])
def test_an_address_is_refused_on_the_command_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main([*command, "oss://bucket/run"])
    assert ended.value.code == 2
    assert "oss://bucket/run is an address" in capsys.readouterr().err


def test_an_address_is_refused_by_dcp() -> None:
    dcp = pytest.importorskip("datastates.adapters.dcp")
    for call in (dcp.DataStatesStorageWriter, dcp.DataStatesStorageReader):
        with pytest.raises(ValueError, match="is an address"):
            call("oss://bucket/run")
    writer = dcp.DataStatesStorageWriter()
    with pytest.raises(ValueError, match="is an address"):
        writer.reset("oss://bucket/run")
    writer.close()
    with pytest.raises(ValueError, match="is an address"):
        dcp.async_save({}, "oss://bucket/run", step=1)


@pytest.mark.parametrize("path", ["/absent/s3://b", "~/absent", "C:absent", PurePosixPath("absent:b/c")], ids=str)
def test_other_paths_with_colons_are_paths(path: Any) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        ds.load(path)
