"""The command line on directories: damaged, superseded and foreign ones, exit statuses, and the JSON schema."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import run, run_json

import datastates as ds
from datastates.cli import commands
from datastates.commit import manifest
from datastates.errors import FormatError
from datastates.providers import HostTensorProvider
from datastates.storage import Location
from datastates.storage.extents import Extent
from datastates.storage.local import LocalStore

CONTAINER = "rank-00000.pt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ds.Checkpointer(tmp_path) as ckpt:
        for step in (80, 100, 85):
            ckpt.snapshot([HostTensorProvider("m", {"a": np.full(5, step)})], step=step).wait_committed()
    return tmp_path


def test_ls_shows_the_newest_last_and_what_a_roll_back_superseded(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run_json(capsys, "ls", root)
    assert status == 0
    assert [(c["step"], c["superseded_by"]) for c in found["checkpoints"]] == [(80, None), (100, 85), (85, None)]
    lines = run(capsys, "ls", root)[1].splitlines()
    assert ["superseded by step 85" in line for line in lines] == [False, False, True, False]


def test_ls_shows_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-00000080" / CONTAINER).unlink()
    (root / "step-00000100" / CONTAINER).write_bytes(b"short")
    status, found = run_json(capsys, "ls", root)
    assert status == 1
    errors = [c.get("error", "") for c in found["checkpoints"]]
    assert errors[0] == f"{CONTAINER} is missing"
    assert errors[1].startswith(f"{CONTAINER} has 5 bytes, not ")
    assert errors[2] == ""
    assert run(capsys, "ls", root)[1].count("damaged: ") == 2


def test_ls_escapes_what_could_control_a_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = root / "step-00000080"
    hostile = manifest.open(one).model_copy(update={"created": "\x1b[2J"})
    (one / "manifest.json").write_bytes(manifest.encode(hostile))
    assert "\\x1b[2J" in run(capsys, "ls", root)[1]


def test_what_checkpoints_share_is_told(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"80": [(0, 0, 100)], "100": [(0, 0, 100), (7, 100, 200)], "085": [(0, 0, 60), (7, 100, 180)]}

    def extents(self: LocalStore, path: Location) -> list[Extent]:
        found = next(found for step, found in places.items() if Path(path).resolve().parent.name.endswith(step))
        return [Extent((1, shift), begin, end, True) for shift, begin, end in found if path.name == CONTAINER]

    monkeypatch.setattr(LocalStore, "extents", extents)
    found = run_json(capsys, "ls", root, "--added")[1]["checkpoints"]
    assert [one["bytes"] - one["added"] for one in found] == [0, 100, 60 + 80]
    first, *lines = run(capsys, "ls", root, "--added")[1].splitlines()
    assert "ADDED" in first
    assert len(lines) == 3
    assert run_json(capsys, "inspect", root, "--step", "100")[1]["shared"] == {"80": 100, "85": 140}
    assert "shares 140 B with step 85, 100 B with step 80\n" in run(capsys, "inspect", root, "--step", "100")[1]
    (root / "latest").symlink_to("step-00000100")
    assert run_json(capsys, "inspect", root / "latest")[1]["shared"] == {"80": 100, "85": 140}
    assert run(capsys, "ls", root / "step-00000080", "--added") == (2, "")
    (root / "step-00000080" / "manifest.json").write_bytes(b"damaged")
    found = run_json(capsys, "ls", root, "--added")[1]["checkpoints"]
    assert [one["added"] is None for one in found] == [True, False, False]


def test_nothing_is_said_where_nothing_is_shared(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "ls", root, "--added")[1]["checkpoints"]
    assert all(one["added"] == one["bytes"] for one in found)
    assert run_json(capsys, "inspect", root)[1]["shared"] == {}
    assert "shares" not in run(capsys, "inspect", root)[1]


def test_ls_tells_whether_the_newest_whole_one_is_recent(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ls", "--newest-within", "2h", root)[0] == 0
    newest = root / "step-00000085"
    for made in ("2020-01-02T03:04:05+00:00", "yesterday"):
        old = manifest.open(newest).model_copy(update={"created": made})
        (newest / "manifest.json").write_bytes(manifest.encode(old))
        assert commands.main(["ls", "--newest-within", "2h", str(root)]) == 1
        assert f"the newest whole checkpoint, step-00000085, is of {made}" in capsys.readouterr().err
        assert run(capsys, "ls", root)[0] == 0
    (newest / CONTAINER).unlink()  # the one before it is recent, and the damage is an error of its own
    assert commands.main(["ls", "--newest-within", "2h", str(root)]) == 1
    assert capsys.readouterr().err == ""
    for step in (80, 100):
        (root / f"step-{step:08d}" / CONTAINER).unlink()
    assert commands.main(["ls", "--newest-within", "2h", str(root)]) == 1
    assert "no checkpoint is whole" in capsys.readouterr().err


@pytest.mark.parametrize("time", ["soon", "2 weeks", "-1", "0"])
def test_ls_refuses_what_is_no_time(time: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["ls", f"--newest-within={time}", str(root)])
    assert ended.value.code == 2
    assert f"{time!r} is no time" in capsys.readouterr().err


def test_ls_lists_a_directory_without_a_manifest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-00000100" / manifest.FILE).unlink()
    status, found = run_json(capsys, "ls", root)
    assert (status, found["without_manifest"]) == (0, ["step-00000100"])
    assert "step-00000100  no checkpoint: it has no manifest.json" in run(capsys, "ls", root)[1]


def test_verify_says_which_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", root)[1].startswith(f"{root / 'step-00000085'}: step 85, ")
    found = run_json(capsys, "verify", root)[1]
    assert (found["step"], found["path"]) == (85, str(root / "step-00000085"))


def test_all_json_has_a_schema(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ls", root], ["inspect", root], ["verify", root], ["diff", root, root]):
        assert run_json(capsys, *command)[1]["schema"] == 1


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "diff"])
def test_the_statuses_are_apart_and_told(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [root, root] if command == "diff" else [root]
    assert run(capsys, command, *paths)[0] == 0
    assert run(capsys, command, *(path / "absent" for path in paths))[0] == 2
    too_long = root / ("n" * 300)  # stands for what cannot be looked at
    assert commands.main([command, *(str(too_long) for _ in paths)]) == (2 if command == "diff" else 1)
    assert str(too_long) in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        commands.main([command, "--help"])
    assert ended.value.code == 0
    assert "exit status: 0 all is well; 1 something is damaged, differs or failed; 2" in " ".join(
        capsys.readouterr().out.split()
    )
    if command != "diff":
        (root / "step-00000085" / CONTAINER).write_bytes(b"short")
        assert run(capsys, command, root)[0] == 1


def test_the_package_runs_as_a_module(root: Path) -> None:
    shutil.rmtree(root / "step-00000100")
    command = [sys.executable, "-m", "datastates", "ls", root]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert "step-00000085" in done.stdout


def test_a_checkpoint_of_dcp_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    assert commands.main(["ls", str(tmp_path)]) == 0
    assert f"{tmp_path.name}  a checkpoint of torch.distributed.checkpoint" in capsys.readouterr().out
    with pytest.raises(FormatError, match=r"\.metadata"):  # it is one, and damaged
        ds.restore([], tmp_path)


def test_each_file_of_a_dcp_checkpoint_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    torch = pytest.importorskip("torch")
    from datastates.adapters.dcp import DataStatesStorageWriter

    dcp.save({"w": torch.ones(1000)}, storage_writer=DataStatesStorageWriter(tmp_path), no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    assert run(capsys, "verify", file)[0] == 0


def test_ls_watches_until_an_interrupt(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def pause(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            shutil.copytree(root / "step-00000085", root / "step-00000085.r7")
        if looks == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)
    assert commands.main(["ls", "--watch", str(root)]) == 130
    said = capsys.readouterr().out
    assert said.count("STEP") == 2
    assert said.count("step-00000085.r7") == 1
