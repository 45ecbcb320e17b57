"""The command line: ls, inspect, verify, and their JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from command import inspected, run, run_json

import datastates as ds
from datastates.cli import commands
from datastates.providers import from_state_dict

W = np.arange(40_000, dtype="f4")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    state = {"w": W.reshape(200, 200), "odd\nkey": np.ones(3, "f4"), "n": 1}
    with ds.Checkpointer(tmp_path / "runs") as checkpointer:
        for step in (1, 20):
            checkpointer.snapshot([from_state_dict("s", state)], step=step)
    return tmp_path / "runs"


def damage(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    file.write_bytes(data)


def test_ls_lists_checkpoints_and_debris(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "step-00000001", root / "step-00000030.partial-0123abcd")
    status, found = run_json(capsys, "ls", root)
    assert status == 0
    assert [c["step"] for c in found["checkpoints"]] == [1, 20]
    assert found["checkpoints"][0]["bytes"] == (root / "step-00000001" / "rank-00000.pt").stat().st_size
    assert found["debris"] == ["step-00000030.partial-0123abcd"]
    status, output = run(capsys, "ls", root)
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == ["STEP", "1", "20", "-"]


def test_ls_and_inspect_show_a_metric_where_one_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(capsys, "ls", root)[1]
    assert plain.split("\n")[0].split() == ["STEP", "CREATED", "RANKS", "SIZE", "NAME"]
    assert "metric" not in run(capsys, "inspect", root)[1]
    with ds.Checkpointer(root) as checkpointer:
        checkpointer.snapshot([from_state_dict("s", {"w": W})], step=30, metric=0.1 + 0.2)
    head, *rows = (line.split() for line in run(capsys, "ls", root)[1].splitlines())
    assert head == ["STEP", "CREATED", "RANKS", "SIZE", "METRIC", "NAME"]
    assert [row[5:] for row in rows] == [["step-00000001"], ["step-00000020"], ["0.3", "step-00000030"]]
    assert [one["metric"] for one in run_json(capsys, "ls", root)[1]["checkpoints"]] == [None, None, 0.1 + 0.2]
    assert run(capsys, "inspect", root)[1].splitlines()[0].endswith(", metric 0.30000000000000004")
    assert run_json(capsys, "inspect", root)[1]["metric"] == 0.1 + 0.2
    assert run_json(capsys, "inspect", root / "step-00000020")[1]["metric"] is None


def test_ls_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ls", tmp_path) == (2, f"no checkpoints in {tmp_path}\n")
    status, found = run_json(capsys, "ls", tmp_path)
    assert (status, found["checkpoints"]) == (2, [])
    assert run(capsys, "ls", tmp_path / "absent")[0] == 2


def test_ls_reports_a_damaged_manifest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(root / "step-00000001" / "manifest.json", 30)
    status, found = run_json(capsys, "ls", root)
    assert status == 1
    (error,) = [c["error"] for c in found["checkpoints"] if c["step"] == 1]
    assert "manifest.json" in error


@pytest.mark.parametrize("part", ["", "step-00000020", "step-00000020/rank-00000.pt"])
def test_inspect_says_what_is_where(root: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, "inspect", root / part)
    assert status == 0
    container = found["containers"][0]
    assert container["step"] == 20
    arrays = {a["key"]: a for a in container["arrays"]}
    assert (arrays["s/w"]["dtype"], arrays["s/w"]["shape"], arrays["s/w"]["bytes"]) == ("float32", [200, 200], 160_000)
    data = Path(container["file"]).read_bytes()[arrays["s/w"]["offset"] :][:160_000]
    assert np.array_equal(np.frombuffer(data, "f4"), W)
    assert [o["key"] for o in container["objects"]] == ["s"]


def test_inspect_shows_digests(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"{zlib.crc32(W):08x}"
    arrays = run_json(capsys, "inspect", root)[1]["containers"][0]["arrays"]
    assert {a["key"]: a["digest"] for a in arrays} == {
        "s/w": expected,
        "s/odd\nkey": f"{zlib.crc32(np.ones(3, 'f4')):08x}",
    }
    header, row = inspected(capsys, root)[1][:2]
    assert (header.split()[-1], row.split()[-1]) == ("DIGEST", expected)


def test_inspect_prints_one_line_a_key(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in inspected(capsys, root)[1][1:]] == ["s/w", r"s/odd\nkey", "s"]


def test_verify_says_only_what_there_is_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one"
    ds.snapshot([from_state_dict("s", {"w": np.ones(3)})], path).wait_committed()
    for checked in (path, path / "rank-00000.pt"):
        status, output = run(capsys, "verify", checked)
        assert status == 0
        assert output.startswith(f"{checked}: ")
        assert ": ," not in output


def test_verify_names_the_key_that_is_wrong(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "verify", root)[1]["ok"] is True
    file = root / "step-00000020" / "rank-00000.pt"
    arrays = run_json(capsys, "inspect", root)[1]["containers"][0]["arrays"]
    damage(file, next(a["offset"] for a in arrays if a["key"] == "s/w") + 100_000)
    status, found = run_json(capsys, "verify", root)
    assert status == 1
    assert [p["key"] for p in found["problems"]] == ["s/w"]
    status, output = run(capsys, "verify", root)
    assert status == 1
    assert output.startswith("s/w in ")


def test_errors_go_to_stderr_and_what_is_not_there_has_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["inspect", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"datastates: no committed checkpoint at {tmp_path}\n"


def test_a_file_of_no_known_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.pt").write_bytes(b"nothing that is known")
    assert commands.main(["verify", str(tmp_path / "notes.pt")]) == 1
    assert "notes.pt" in capsys.readouterr().err


def test_the_command_is_installed(root: Path) -> None:
    command = Path(sys.executable).with_name("datastates")
    done = subprocess.run([command, "ls", root], capture_output=True, text=True, check=True)
    assert "step-00000020" in done.stdout


def test_a_closed_pipe_is_no_traceback(root: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "datastates.cli", "inspect", str(root), "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"datastates {ds.__version__}\n"


def test_ls_of_one_checkpoint_lists_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = root / "step-00000001"
    assert commands.main(["ls", str(root), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert commands.main(["ls", str(one), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == [e for e in listed if e["name"] == one.name]
    (container,) = one.glob("*.pt")
    assert commands.main(["ls", str(container)]) == 0
    assert f"{container.name}  a checkpoint of datastates" in capsys.readouterr().out
    os.truncate(one / "manifest.json", 5)
    assert commands.main(["ls", str(one)]) == 1
    assert "damaged: " in capsys.readouterr().out
    assert commands.main(["ls", str(root / "nothing")]) == 2
    assert "neither a directory nor a checkpoint" in capsys.readouterr().err
