"""What the command prints, wherever it prints to: always JSON with ``--json``, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_json
from short import first

import datastates as ds
from datastates.cli import commands
from datastates.providers import from_state_dict

COMMAND = [sys.executable, "-P", "-m", "datastates"]
KEYS = {"w\u00e9": np.ones(3), "x\ud800": np.ones(1), "\x1b[2J": np.ones(2)}
PLACES: dict[str, tuple[dict[str, str], str]] = {
    "ASCII": ({"PYTHONIOENCODING": "ascii"}, ""),
    "latin-1": ({"PYTHONIOENCODING": "latin-1"}, ""),
    "UTF-8": ({"PYTHONIOENCODING": "utf-8"}, ""),
    "the C locale": ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, ""),
    "closed": ({}, ">&-"),
    "all closed": ({}, "<&- >&- 2>&-"),
    "errors closed": ({}, "2>&-"),
    "full": ({}, "> /dev/full"),
    "all full": ({}, "> /dev/full 2> /dev/full"),
    "errors full": ({}, "2> /dev/full"),
}
BUFFERED: dict[str, dict[str, str]] = {"buffered": {}, "unbuffered": {"PYTHONUNBUFFERED": "1"}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two checkpoints, with keys that are hard to print, beside one that is truncated."""
    folder = tmp_path_factory.mktemp("output")
    for name in ("whole", "cut"):
        with ds.Checkpointer(folder / name) as checkpointer:
            for step in (1, 2):
                state = {**KEYS, "array": np.full(3000, step), "value": step}
                checkpointer.snapshot([from_state_dict("model", state)], step=step).wait_committed()
    os.truncate(folder / "cut" / "step-00000002" / "rank-00000.pt", 5000)
    return folder


def shell(
    root: Path, arguments: list[object], place: str, buffered: str = "buffered"
) -> subprocess.CompletedProcess[str]:
    environment, redirection = PLACES[place]
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["sh", "-c", f'"$@" {redirection}', "sh", *COMMAND, *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="latin-1",
        env={**given, **environment, **BUFFERED[buffered]},
        cwd=root.parent,
    )


@pytest.mark.by_hand
@pytest.mark.parametrize("buffered", ["buffered", pytest.param("unbuffered", marks=pytest.mark.by_hand)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["ls", "inspect", pytest.param("verify", marks=pytest.mark.long)])
def test_no_place_to_print_to_ends_in_a_traceback(name: str, place: str, buffered: str, root: Path) -> None:
    done = shell(root, [name, root / "whole"], place, buffered)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    lost = not place.startswith("errors") and ("closed" in place or "full" in place)
    assert done.returncode == (1 if lost else 0)
    if lost and "all" not in place:
        assert done.stderr.startswith("datastates: standard output")
    if name == "inspect" and not lost:
        assert r"x\ud800" in done.stdout
        assert ("w\\xe9" if place in ("ASCII", "the C locale") else "w") in done.stdout
        assert "\x1b" not in done.stdout


@pytest.mark.parametrize("buffered", ["buffered", pytest.param("unbuffered", marks=pytest.mark.by_hand)])
@pytest.mark.parametrize(
    "arguments",
    first([["--help"], ["ls", "--json"], ["--version"], ["ls"], ["ls", "nowhere"]], rest=pytest.mark.by_hand),
)
def test_help_and_wrong_calls_end_in_no_traceback(arguments: list[object], buffered: str, root: Path) -> None:
    for place in ("full", "all closed", "all full", "errors full"):
        done = shell(root, arguments, place, buffered)
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        printed = place == "errors full" and arguments in (["--help"], ["--version"])
        assert done.returncode in ((0,) if printed else (1, 2))


@pytest.mark.long
@pytest.mark.parametrize("buffered", BUFFERED)
@pytest.mark.parametrize("both", [False, True])
def test_a_reader_who_has_gone_ends_it_quietly(both: bool, buffered: str, root: Path) -> None:
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "ls", str(root / "whole")],
        stdout=write,
        stderr=write if both else subprocess.PIPE,
        env={**given, **BUFFERED[buffered]},
    )
    os.close(write)
    assert done.returncode == 1
    assert not done.stderr


def calls(source: Path, other: Path, target: Path) -> dict[str, list[object]]:
    return {
        "ls": ["ls", source],
        "inspect": ["inspect", source],
        "verify": ["verify", source],
        "diff": ["diff", source, other],
        "export": ["export", source, target],
    }


def empty(root: Path, folder: Path) -> Path:
    del root
    (folder / "empty").mkdir()
    return folder / "empty"


def file(root: Path, folder: Path) -> Path:
    del root
    (folder / "file").write_bytes(b"nothing that is known")
    return folder / "file"


def bad_manifest(root: Path, folder: Path) -> Path:
    del root
    ds.snapshot([from_state_dict("m", {"a": np.ones(3)})], folder / "c").wait_committed()
    (folder / "c" / "manifest.json").write_bytes(b"{}")
    return folder / "c"


WRONG: dict[str, Callable[[Path, Path], Path]] = {
    "truncated": lambda root, _: root / "cut",
    "truncated itself": lambda root, _: root / "cut" / "step-00000002",
    "a truncated file": lambda root, _: root / "cut" / "step-00000002" / "rank-00000.pt",
    "nowhere": lambda _, folder: folder / "nowhere",
    "empty": empty,
    "file": file,
    "manifest": bad_manifest,
}


@pytest.mark.parametrize("name", ["ls", "inspect", "verify", "diff", "export"])
@pytest.mark.parametrize("wrong", WRONG)
def test_json_is_printed_whatever_is_wrong(
    wrong: str, name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = WRONG[wrong](root, tmp_path)
    status, found = run_json(capsys, *calls(source, root / "whole", tmp_path / "out.safetensors")[name])
    assert found["schema"] == 1
    if name == "ls" and wrong == "a truncated file":
        assert status == 0  # it is only looked at from outside
        return
    assert status == (2 if wrong in ("nowhere", "empty") or name == "diff" or (name, wrong) == ("ls", "file") else 1)
    if name != "ls":
        assert found["ok"] is False
        assert found["problems"][0]["problem"] if name == "verify" and status == 1 else found["error"]["message"]


@pytest.mark.parametrize(
    "arguments", [["verify", "--json"], ["inspect", "a", "--step", "x", "--json"], ["what", "--json"]]
)
def test_json_is_printed_for_a_wrong_call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(arguments)
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "WrongCallError"


def test_each_command_takes_a_step(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: object) -> Any:
        status, found = run_json(capsys, *arguments)
        assert status == 0
        return found

    cut, whole = root / "cut", root / "whole"
    assert call("inspect", cut, "--step", 1)["containers"][0]["step"] == 1
    assert call("verify", cut, "--step", "1")["step"] == 1
    assert call("diff", cut, whole, "--step", 1)["equal"]
    assert call("export", cut, tmp_path / "out.safetensors", "--step", 1, "--keys", "model/array")["tensors"] == 1
    status, found = run_json(capsys, "verify", whole, "--step", 7)
    assert (status, found["error"]["message"]) == (2, f"no committed checkpoint of step 7 in {whole}, only of 1, 2")


@pytest.mark.parametrize("name", ["inspect", "verify", "diff", "export"])
def test_advice_is_for_a_shell(name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = calls(root / "cut", root / "whole", tmp_path / "out.safetensors")[name]
    commands.main([str(a) for a in arguments])
    said = capsys.readouterr().err
    assert said.endswith("the newest before it that looks whole is that of step 1: take it with --step 1\n")
    assert "step=" not in said


def test_an_impossible_option_is_called_as_in_a_shell(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "out.safetensors")
    assert commands.main(["export", str(root / "whole"), target, "--shard-size", "1GB"]) == 2
    assert capsys.readouterr().err.startswith("datastates: --shard-size: out.safetensors is one file")


def test_an_export_says_what_it_leaves_out(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["export", str(root / "whole"), str(tmp_path / "out.safetensors"), "--keys", "model/array"])
    assert "model: what is no tensor in it is left out\n" in capsys.readouterr().out


def test_an_interrupt_is_no_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_parser", interrupt)
    assert commands.main(["ls", str(root)]) == 130
    assert capsys.readouterr().err == "datastates: interrupted\n"


@pytest.mark.parametrize("place", ["absolute", "relative"])
def test_beside_damaged_data_an_older_checkpoint_is_named(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ds.Checkpointer(tmp_path / "runs") as checkpointer:
        for step in (1, 2):
            checkpointer.snapshot([from_state_dict("m", {"a": np.full(3000, step)})], step=step).wait_committed()
    file = tmp_path / "runs" / "step-00000002" / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[data.index(np.full(100, 2).tobytes())] ^= 1
    file.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    assert commands.main(["verify", "runs" if place == "relative" else str(tmp_path / "runs")]) == 1
    assert "the newest before it that looks whole is that of step 1" in capsys.readouterr().err
