"""Power cuts: what was reported committed before the disk was cloned is on the clone.

Usage, as root: ``power_cuts.py DIRECTORY {btrfs,ext4,xfs} [--seed N] [--cuts N]``. The disk is an image on an XFS file
system. A process saves on the disk, and reports each commit. Where the disk can share ranges, checkpoints share what
has not changed. At random moments the disk is cloned as it is. What the kernel has not written yet is not on the clone,
as after a power cut. The clone is mounted, which replays its journal. Everything that was reported before must be on
it. Exit code 77: this system cannot do that, for a reason that is printed.

It runs in a mount namespace of its own, so that nothing stays mounted, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import datastates as ds
from datastates.commit import newest
from datastates.commit.directories import partials
from datastates.commit.fence import writers_of
from datastates.commit.names import STEP
from datastates.commit.tiers import tier_of
from datastates.formats.own import verify_container
from datastates.providers import HostTensorProvider, from_state_dict
from datastates.reading.every_container import open_checkpoint
from datastates.saving.snapshot import has_ended

CANNOT = 77
FICLONE = 0x40049409
HOST_BYTES, DISK_BYTES = 3 << 30, 512 << 20
"""The sizes of sparse files, which take only as much space as is written."""
MAKE = {
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-m", "reflink=1"],
}
SHARING = {"btrfs", "xfs"}
OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}
KEEP = 3
FROZEN = 4
"""The largest array stays as it is for so many steps."""


def state_of(step: int) -> dict[str, Any]:
    rng, slow = np.random.default_rng(step), np.random.default_rng(step // FROZEN)
    return {
        "lazy": {
            "large": slow.random(slow.integers(100_000, 400_000)),
            "medium": rng.random(20_000),
            "small": rng.integers(0, 256, 777, np.uint8),
        },
        "rest": {"step": step, "ratio": float(rng.random())},
    }


def providers_of(state: dict[str, Any]) -> list[ds.StateProvider]:
    return [HostTensorProvider("lazy", state["lazy"], lazy=True), from_state_dict("rest", state["rest"])]


# --- the process that saves


def save(root: Path, pipe: int) -> None:
    """Save until killed, and report on the pipe each commit, and how many bytes it shares."""
    step = 0
    with ds.Checkpointer(root, keep_last=KEEP, incremental=True, **OPTIONS) as ckpt:
        taken: list[ds.Snapshot] = []
        while True:
            step += 1
            taken.append(ckpt.snapshot(providers_of(state_of(step)), step=step))
            for snapshot in [s for s in taken if has_ended(s)]:
                snapshot.wait_committed()
                taken.remove(snapshot)
                os.write(pipe, f"{snapshot.step} {snapshot.report.executor.get('shared', 0)}\n".encode())


@contextlib.contextmanager
def saving(root: Path) -> Iterator[int]:
    """Run ``save`` in a process of its own; gives the end of the pipe to read from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            save(root, writing)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # `save` ends only when it fails or is killed
    os.close(writing)
    try:
        yield reading
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


# --- disks


def call(*command: object) -> None:
    """Run a command, which prints its own errors."""
    subprocess.run([str(part) for part in command], check=True)


def make_disk(image: Path, kind: str, nbytes: int) -> None:
    with image.open("xb") as file:
        file.truncate(nbytes)
    call(*MAKE[kind], image)


@contextlib.contextmanager
def mounted(image: Path, kind: str, at: Path) -> Iterator[Path]:
    """Mount an image; its loop device goes with the mount."""
    at.mkdir(exist_ok=True)
    # a clone has the same identity as its disk
    call("mount", "-t", kind, "-o", "loop,nouuid" if kind == "xfs" else "loop", image, at)
    try:
        yield at
    finally:
        unmount(at)


def unmount(at: Path) -> None:
    """Unmount once nothing is open there: the kernel ends the ring of a killed process after the process itself."""
    for _ in range(600):
        if subprocess.run(["umount", at], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            return
        time.sleep(0.1)
    call("umount", at)


def clone(image: Path, to: Path) -> None:
    with image.open("rb") as source, to.open("xb") as target:
        fcntl.ioctl(target, FICLONE, source.fileno())


# --- what is on a clone


def told(pipe: int, seconds: float) -> dict[int, int]:
    """The steps that are reported within some seconds, and the bytes that each shares.

    Raises RuntimeError if the process that saves has ended.
    """
    end, text = time.monotonic() + seconds, b""
    os.set_blocking(pipe, False)
    while True:
        over = time.monotonic() >= end
        try:
            data = os.read(pipe, 1 << 16)
            if not data:
                raise RuntimeError("the process that saves has ended")
            text += data
        except BlockingIOError:
            if over:
                return {int(step): int(shared) for step, shared in map(bytes.split, text.splitlines())}
            time.sleep(min(0.001, max(0.0, end - time.monotonic())))


def audit(root: Path, before: Collection[int]) -> list[str]:
    """What is wrong with a directory in which the steps ``before`` had been committed."""
    wrong = []
    committed = newest.committed(tier_of(root))
    for step in before:
        if step not in committed and sum(s > step for s in committed) < KEEP:
            wrong.append(f"step {step} is lost; there are {list(committed)}")
    for step, path in committed.items():
        try:
            _, containers = open_checkpoint(path)
            wrong += [str(p) for c in containers for p in verify_container(c, lambda _: None)]
            found, expected = ds.load(path, **OPTIONS), state_of(step)
            same = all(np.array_equal(found["lazy"][k], expected["lazy"][k]) for k in expected["lazy"])
            if not same or found["rest"] != expected["rest"]:
                wrong.append(f"step {step} holds other values")
        except (ds.DatastatesError, OSError) as error:
            wrong.append(f"step {step}: {error!r}")
    try:
        wrong += next_run(root, max(committed, default=None))
    except (ds.DatastatesError, OSError) as error:
        wrong.append(f"the next run: {error!r}")
    return wrong


def next_run(root: Path, newest: int | None) -> list[str]:
    """What is wrong with another run that goes on in the directory."""
    state = state_of(newest or 0)
    for array in state["lazy"].values():
        array[...] = 0
    with ds.Checkpointer(root, incremental=True, **OPTIONS) as ckpt:
        wrong: list[str] = []
        restored = ckpt.restore(providers_of(state))
        if (restored.step if restored else None) != newest:
            wrong.append(f"the next run does not restore {newest}")
        ckpt.snapshot(providers_of(state), step=(newest or 0) + 1)
    # a line that the cut has taken from a lock file leaves a writer that nobody knows: its directory stays for a day
    told = [left for left in partials(root, STEP) if any(one.process for one in writers_of(left))]
    return wrong + [f"the next run leaves {left}" for left in told]


class CannotError(Exception):
    """Power cuts cannot be tried here."""


@contextlib.contextmanager
def disks(base: Path, kind: str) -> Iterator[tuple[Path, Path]]:
    """The image of a mounted disk, which can be cloned, and where the disk is mounted."""
    with contextlib.ExitStack() as stack:
        try:
            make_disk(base / "host.img", "xfs", HOST_BYTES)
            disk = stack.enter_context(mounted(base / "host.img", "xfs", base / "host")) / "disk.img"
            make_disk(disk, kind, DISK_BYTES)
            at = stack.enter_context(mounted(disk, kind, base / "disk"))
            clone(disk, disk.with_name("first.img"))
        except (subprocess.CalledProcessError, OSError) as error:
            raise CannotError(str(error)) from error
        yield disk, at


def cut_again_and_again(base: Path, kind: str, seed: int, cuts: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    known: dict[int, int] = {}
    half = 0
    with disks(base, kind) as (disk, at), saving(at / "run") as pipe:
        copy = disk.with_name("clone.img")
        while not known:
            known |= told(pipe, 0.05)
        for number in range(cuts):
            known |= told(pipe, rng.uniform(0, 0.2))
            clone(disk, copy)
            with mounted(copy, kind, base / "clone") as cut:
                half += len(partials(cut / "run", STEP))  # the process that writes them lives
                problems = audit(cut / "run", known)
            copy.unlink()
            wrong += [f"cut {number} after step {max(known)}: {text}" for text in problems]
    shared = sum(map(bool, known.values()))
    print(
        f"{cuts} cuts of {kind}: {len(known)} commits told, of which {shared} shared bytes, "
        f"{half} half snapshots found, {len(wrong)} wrong"
    )
    return wrong if shared or kind not in SHARING else [*wrong, "nothing was shared"]


# namespaces of its own, for mounts and for processes, so that none is left, whatever ends it
OWN = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def missing(kind: str) -> str:
    """What this system lacks for power cuts; empty where it lacks nothing."""
    if os.geteuid() != 0:
        return "this needs root"
    tools = [t for t in ("unshare", "mount", "umount", "mkfs.xfs", MAKE[kind][0]) if shutil.which(t) is None]
    if tools:
        return f"there is no {' and no '.join(tools)}"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    if subprocess.run([*OWN, "true"], capture_output=True, check=False).returncode != 0:
        return "no mount namespace of one's own is allowed"
    return ""


def cannot(reason: object) -> int:
    print(f"POWER CUTS WERE NOT TRIED: {reason}")
    return CANNOT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("kind", choices=sorted(MAKE))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=300)
    arguments = parser.parse_args()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if os.getpid() != 1:
        if reason := missing(arguments.kind):
            return cannot(reason)
        sys.stdout.flush()
        os.execvp(OWN[0], [*OWN, sys.executable, *sys.argv])
    # warnings about what an interrupted run left are expected here
    logging.getLogger("datastates").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as base:
        try:
            wrong = cut_again_and_again(Path(base), arguments.kind, arguments.seed, arguments.cuts)
        except CannotError as error:
            return cannot(error)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
