"""File systems that are mounted for real hold checkpoints and exports, or say what rules them out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import KINDS, MissingError, Mounts, rclone, unmount

import datastates as ds
from datastates.providers import from_state_dict

EXERCISE = Path(__file__).with_name("exercise.py")
PARTS = ("save", "save by two ranks", "export to one.safetensors", "export to one.pt", "export to folder")
OUT_OF_ORDER = dict.fromkeys(PARTS, "in order, from one descriptor.*--vfs-cache-mode full")
LOST_BY_RENAMES = dict.fromkeys(
    ("save", "save by two ranks", "export to folder"), "lost as the folder around it is renamed.*before version 1.62"
)
REFUSED: dict[str, dict[str, str]] = {
    "rclone, off": OUT_OF_ORDER,
    **{f"rclone, {mode}": LOST_BY_RENAMES for mode in ("minimal", "writes", "full")},
    "newer rclone, off": OUT_OF_ORDER,
}
"""For each file system, what its parts say where they are not done; docs/filesystems.md says so, too."""

pytestmark = pytest.mark.by_hand


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder on a disk, which servers can reach: pytest's own folders are closed to other users."""
    if os.geteuid():
        pytest.skip("to mount needs root")
    with tempfile.TemporaryDirectory(prefix="mounts-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@contextlib.contextmanager
def mounting(place: Path, what: str) -> Iterator[Mounts]:
    """Mounts in a folder. What this machine lacks skips the test, and says so."""
    with Mounts(place) as mounts:
        try:
            yield mounts
        except MissingError as missing:
            pytest.skip(f"{what} was NOT tried: {missing}")


def exercise(*paths: Path) -> dict[str, str]:
    """Exercise a mount in a process of its own; returns what each part says."""
    command = [sys.executable, EXERCISE, paths[0], paths[-1], paths[0].parent / "elsewhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_system(kind: str, place: Path) -> None:
    with mounting(place, kind) as mounts:
        found = exercise(*KINDS[kind](mounts))
    print(kind, json.dumps(found, indent=2))
    refused = REFUSED.get(kind, {})
    for part, said in found.items():
        assert re.search(refused.get(part, r"\Aok\Z"), said), f"{part}: {said}"
    assert set(PARTS) <= set(found)


READS = """
import sys
from pathlib import Path
import exercise, datastates as ds
from datastates.providers import from_state_dict
place, elsewhere = map(Path, sys.argv[1:])
exercise.loaded(place, 0)
exercise.verified(place)
exercise.exported(place, elsewhere / "one.safetensors")
state = exercise.state_of(0)
with ds.Checkpointer(place) as ckpt:
    assert ckpt.restore([from_state_dict("rank0", state)]).step == exercise.STEPS
    exercise.same(state, exercise.STEPS)
    try:
        ckpt.snapshot([from_state_dict("rank0", state)], step=9).wait_committed()
    except ds.errors.StorageError as error:
        print(error)
"""
LOST = """
import subprocess, sys
from pathlib import Path
import exercise, datastates as ds
from datastates.providers import from_state_dict
place = Path(sys.argv[1])
state = [from_state_dict("rank0", exercise.state_of(0))]
with ds.Checkpointer(place / "run", on_error="warn") as ckpt:
    ckpt.snapshot(state, step=1).wait_committed()
    subprocess.run(["umount", "-l", place], check=True)
    try:
        ckpt.snapshot(state, step=2).wait_committed()
    except (ds.errors.StorageError, ds.errors.CommitError) as error:
        print(error)
print(*place.iterdir())
"""
STOPPED = """
import os, signal, sys
from pathlib import Path
import exercise, datastates as ds
from datastates.providers import from_state_dict
place, server = Path(sys.argv[1]), int(sys.argv[2])
state = exercise.state_of(0)
with ds.Checkpointer(place / "run") as ckpt:
    ckpt.snapshot([from_state_dict("rank0", state)], step=1).wait_committed()
    state.update(exercise.state_of(2))
    os.kill(server, signal.SIGSTOP)
    second = ckpt.snapshot([from_state_dict("rank0", state)], step=2)
    print(second.committed, flush=True)
    os.kill(server, signal.SIGCONT)
    second.wait_committed()
exercise.same(ds.load(place / "run")["rank0"], 2)
"""

SAVES = """
import sys
from pathlib import Path
import exercise
print(exercise.told(lambda: exercise.save(Path(sys.argv[1]), 1)))
"""
READER = """
import sys
from pathlib import Path
import exercise, datastates as ds
from datastates.providers import from_state_dict
from hold import held
here, there = (Path(path) / "run" for path in sys.argv[1:])
with ds.Checkpointer(here) as ckpt:
    ckpt.snapshot([from_state_dict("rank0", exercise.state_of(1))], step=1).wait_committed()
    with held():
        second = ckpt.snapshot([from_state_dict("rank0", exercise.state_of(2))], step=2)
        with ds.Checkpointer(there) as reader:
            assert reader.steps() == [1]
        assert not second.committed
    second.wait_committed()
exercise.same(ds.load(there)["rank0"], 2)
"""
ALIKE = """
import sys
import numpy as np, datastates as ds
from datastates.providers import from_state_dict
ds.snapshot([from_state_dict("alike", {"w": np.ones(4_000_000)})], sys.argv[1] + "/one").wait_committed()
"""


def run(script: str, *arguments: object) -> str:
    """Run a script beside the exercise; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=os.environ | {"PYTHONPATH": f"{EXERCISE.parent}:{EXERCISE.parents[1] / 'support'}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_reader_at_another_mount_deletes_nothing(place: Path) -> None:
    with mounting(place, "bindfs, mounted twice") as mounts:
        run(READER, *KINDS["bindfs, mounted twice"](mounts))


@pytest.mark.parametrize("kind", ["squashfs", "squashfuse"])
def test_what_cannot_be_written_is_read(kind: str, place: Path) -> None:
    with mounting(place, kind) as mounts:
        mounts.need("mksquashfs", *(["squashfuse"] if kind == "squashfuse" else []))
        source, image, at = mounts.folder("source"), place / "image", mounts.folder("mount")
        run("import sys, exercise, pathlib; exercise.save(pathlib.Path(sys.argv[1]), 1)", source / "run")
        mounts.call("mksquashfs", source, image, "-quiet")
        if kind == "squashfs":
            mounts.mount("mount", "-o", "loop,ro", image, at, at=at)
        else:
            mounts.serve("squashfuse", "-f", image, at, at=at)
        said = run(READS, at / "run", mounts.folder("exports"))
        assert re.search(r"Read-only file system|Function not implemented", said), said


@pytest.mark.parametrize("mode", ["writes", "full"])
def test_rclone_that_uploads_at_once_loses_files_too(mode: str, place: Path) -> None:
    """A small file is uploaded before the rename, a large one is not: it would be lost for ever."""
    with mounting(place, "rclone that uploads at once") as mounts:
        (at,) = rclone(mode, "--vfs-write-back", "0s")(mounts)
        assert re.search(LOST_BY_RENAMES["save"], run(SAVES, at / "run"))
        assert not list((at / "run").glob("step-*"))


def test_a_mount_that_is_lost(place: Path) -> None:
    at = place / "mount"
    at.mkdir()
    with mounting(place, "a lost mount") as mounts:
        mounts.mount("mount", "-t", "tmpfs", "-o", "size=256M", "none", at, at=at)
        said = run(LOST, at)
    assert str(at) in said.splitlines()[0]
    assert said.splitlines()[-1] == ""
    assert not list(at.iterdir())


def test_a_mount_that_has_stopped(place: Path) -> None:
    with mounting(place, "a stopped mount") as mounts:
        mounts.need("bindfs")
        below, at = mounts.folder("below"), mounts.folder("mount")
        server = mounts.start("bindfs", "-f", below, at, until=lambda: os.path.ismount(at))
        mounts.callback(unmount, at)
        assert run(STOPPED, at, server.pid) == "False\n"


def test_what_btrfs_compresses_is_compressed(place: Path) -> None:
    with mounting(place, "Btrfs, compressed") as mounts:
        mounts.need("filefrag")
        (at,) = KINDS["Btrfs"](mounts)
        run(ALIKE, at)
        mounts.call("btrfs", "filesystem", "sync", at)
        (file,) = at.rglob("*.pt")
        extents = subprocess.run(["filefrag", "-v", file], capture_output=True, text=True, check=True).stdout
    assert "encoded" in extents, extents


@pytest.mark.parametrize("kind", ["XFS", "Btrfs"])
def test_ranges_that_have_not_changed_are_shared(kind: str, place: Path) -> None:
    torch = pytest.importorskip("torch")
    with mounting(place, kind) as mounts:
        root = KINDS[kind](mounts)[0] / "run"
        state = {f"w{i}": torch.randn(3_000_000 + i) for i in range(8)}
        steps = {}
        with ds.Checkpointer(root, incremental=True) as checkpointer:
            for step in range(4):
                state["w3"][1000:1010] += 1
                snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=step)
                snapshot.wait_committed()
                steps[step] = snapshot.report.executor, state["w3"].clone()
        assert all((figures["bytes"] < 2_000_000) == (step > 0) for step, (figures, _) in steps.items())
        command = [sys.executable, "-m", "datastates", "ls", root, "--added", "--json"]
        done = subprocess.run(command, capture_output=True, check=True, cwd=place)
        listed = json.loads(done.stdout)["checkpoints"]
        assert [one["added"] < 2_000_000 for one in listed] == [False, True, True, True]
        for file in root.rglob("*.pt"):  # nothing is left allocated behind the end
            assert file.stat().st_blocks * 512 < file.stat().st_size + (1 << 20)
        shutil.rmtree(root / "step-00000000")
        for step in (1, 2, 3):
            found = ds.load(root, step=step)["state"]
            assert torch.equal(found["w3"], steps[step][1])
            assert all(torch.equal(found[key], value) for key, value in state.items() if key != "w3")
        free = os.statvfs(root)
        used = (free.f_blocks - free.f_bfree) * free.f_frsize
        assert used < 2 * sum(value.nbytes for value in state.values())


LINKING = [
    "ext4",
    "overlayfs",
    "fuse-overlayfs",
    "mergerfs",
    "unionfs-fuse",
    "bindfs, mounted twice",
    "sshfs",
    "GlusterFS",
]
LINKING_NOTHING = ["gocryptfs", "CryFS", "s3fs"]


@pytest.mark.parametrize("kind", [*LINKING, *LINKING_NOTHING])
def test_files_that_have_not_changed_are_linked(kind: str, place: Path) -> None:
    torch = pytest.importorskip("torch")
    with mounting(place, kind) as mounts:
        root = KINDS[kind](mounts)[0] / "run"
        state = {f"w{i}": torch.randn(300_000 + i) for i in range(8)}
        steps = {}
        with ds.Checkpointer(root, incremental=True) as checkpointer:
            for step in range(5):
                state["w3"] += 1
                snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=step)
                snapshot.wait_committed()
                steps[step] = snapshot.report.executor.get("shared", 0), state["w3"].clone()
        assert [shared > 8_000_000 for shared, _ in steps.values()] == [False] * 2 + [kind in LINKING] * 3
        shutil.rmtree(root / "step-00000002")
        for step in (0, 1, 3, 4):
            found = ds.load(root, step=step)["state"]
            assert torch.equal(found["w3"], steps[step][1])
            assert all(torch.equal(found[key], value) for key, value in state.items() if key != "w3")


@pytest.mark.parametrize("kind", ["XFS", "Btrfs", "ext4"])
def test_what_is_shared_is_right_whatever_happens(kind: str, place: Path) -> None:
    campaign = Path(__file__).parents[1] / "crash" / "campaign.py"
    with mounting(place, kind) as mounts:
        command = [sys.executable, campaign, KINDS[kind](mounts)[0] / "rounds", "--rounds", "30"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d shared$", done.stdout, re.MULTILINE), done.stdout
