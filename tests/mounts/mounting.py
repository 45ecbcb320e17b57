"""Mounts file systems for real, each by the program that serves it. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_IMAGE_NBYTES = 1 << 30
_PATIENCE = 60.0
"""Seconds that a server gets to begin."""
_S3 = """
import boto3, sys
keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
boto3.client("s3", endpoint_url=sys.argv[1], **keys).create_bucket(Bucket="bucket")
"""


class MissingError(Exception):
    """This machine lacks what a file system needs."""


class Mounts(contextlib.ExitStack):
    """Mounts and servers in a folder. They end in the reverse order, and the folder stays."""

    def __init__(self, place: Path) -> None:
        """Take the folder."""
        super().__init__()
        self.place = place

    def need(self, *programs: str) -> None:
        """Raise MissingError unless all programs are there."""
        if absent := [program for program in programs if not shutil.which(program)]:
            raise MissingError(f"{', '.join(absent)} is not installed")

    def folder(self, name: str) -> Path:
        """Make a folder."""
        path = self.place / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def call(self, *command: object, stdin: str = "", **variables: str) -> None:
        """Run a command; raises MissingError with its last words if it fails."""
        done = subprocess.run(
            [str(part) for part in command],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env=_environment(variables),
        )
        if done.returncode:
            raise MissingError(f"{command[0]}: {(done.stderr or done.stdout).strip()[-200:]}")

    def start(self, *command: object, until: Callable[[], bool], **variables: str) -> subprocess.Popen[bytes]:
        """Start a server, and wait until it serves."""
        log = self.place / "server.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(variables),
            )
        self.callback(process.wait)
        self.callback(process.kill)
        end = time.monotonic() + _PATIENCE
        while not until():
            if process.poll() is not None or time.monotonic() > end:
                raise MissingError(f"{command[0]} serves nothing: {log.read_text(errors='replace').strip()[-300:]}")
            time.sleep(0.05)
        return process

    def mount(self, *command: object, at: Path, stdin: str = "", **variables: str) -> Path:
        """Mount by a command that ends once it has mounted."""
        self.call(*command, stdin=stdin, **variables)
        self.callback(unmount, at)
        if not os.path.ismount(at):
            raise MissingError(f"{command[0]} has mounted nothing")
        return at

    def serve(self, *command: object, at: Path, **variables: str) -> Path:
        """Mount by a server that stays in the foreground."""
        self.start(*command, until=lambda: os.path.ismount(at), **variables)
        self.callback(unmount, at)
        return at

    def image(self, *make: str, options: str = "loop") -> Path:
        """Make a file system in a file, and mount it."""
        self.need(make[0])
        image, at = self.place / "image", self.folder("mount")
        with image.open("wb") as file:
            file.truncate(_IMAGE_NBYTES)
        self.call(*make, image)
        return self.mount("mount", "-o", options, image, at, at=at)

    def bucket(self) -> str:
        """Start an S3 server with a bucket; returns its address."""
        server, port = moto_server(), free_port()
        self.start(server, "-H", "127.0.0.1", "-p", port, until=lambda: answers(port))
        address = f"http://127.0.0.1:{port}"
        self.call(Path(server).parent / "python", "-c", _S3, address)
        return address


def unmount(at: Path) -> None:
    """Unmount, and if files are still open, lazily."""
    for options in ((), ("-l",)):
        if subprocess.run(["umount", *options, at], capture_output=True, check=False).returncode == 0:
            return


def moto_server() -> str:
    """The program of the S3 server; raises MissingError."""
    if (server := os.environ.get("MOTO_SERVER") or shutil.which("moto_server")) is None:
        raise MissingError("moto_server is not installed, and MOTO_SERVER does not name it")
    return server


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether a server listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _environment(variables: dict[str, str]) -> dict[str, str]:
    """This machine's settings of S3 are not for the server of a test."""
    return {key: value for key, value in os.environ.items() if not key.startswith("AWS_")} | variables


# --- kinds: each mounts in a folder, and returns the paths that the two ranks use


def _ext4(mounts: Mounts) -> list[Path]:
    return [mounts.image("mkfs.ext4", "-q", "-F")]


def _xfs(mounts: Mounts) -> list[Path]:
    return [mounts.image("mkfs.xfs", "-q", "-f")]


def _btrfs(mounts: Mounts) -> list[Path]:
    return [mounts.image("mkfs.btrfs", "-q", "-f", options="loop,compress-force=zstd")]


def _overlay(mounts: Mounts) -> list[Path]:
    lower, upper, work, at = map(mounts.folder, ("lower", "disk/upper", "disk/work", "mount"))
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    return [mounts.mount("mount", "-t", "overlay", "-o", options, "overlay", at, at=at)]


def _fuse_overlayfs(mounts: Mounts) -> list[Path]:
    mounts.need("fuse-overlayfs")
    lower, upper, work, at = map(mounts.folder, ("lower", "upper", "work", "mount"))
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    return [mounts.serve("fuse-overlayfs", "-f", "-o", options, at, at=at)]


def _mergerfs(mounts: Mounts) -> list[Path]:
    mounts.need("mergerfs")
    one, other, at = map(mounts.folder, ("one", "other", "mount"))
    return [mounts.serve("mergerfs", "-f", "-o", "category.create=mfs", f"{one}:{other}", at, at=at)]


def _unionfs(mounts: Mounts) -> list[Path]:
    mounts.need("unionfs")
    upper, lower, at = map(mounts.folder, ("upper", "lower", "mount"))
    return [mounts.serve("unionfs", "-f", "-o", "cow", f"{upper}=RW:{lower}=RO", at, at=at)]


def _bindfs(mounts: Mounts) -> list[Path]:
    mounts.need("bindfs")
    below = mounts.folder("below")
    return [mounts.serve("bindfs", "-f", below, at, at=at) for at in map(mounts.folder, ("mount", "again"))]


def _sshfs(mounts: Mounts) -> list[Path]:
    mounts.need("sshfs", "ssh-keygen", "/usr/sbin/sshd")
    port, place, below = free_port(), mounts.place, mounts.folder("below")
    for key in ("host", "user"):
        mounts.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / key)
    Path("/run/sshd").mkdir(exist_ok=True)
    options = [f"HostKey={place / 'host'}", f"AuthorizedKeysFile={place / 'user.pub'}", "StrictModes=no", "UsePAM=no"]
    options += [f"Port={port}", "ListenAddress=127.0.0.1", f"PidFile={place / 'pid'}", "Subsystem=sftp internal-sftp"]
    settings = [word for option in options for word in ("-o", option)]
    mounts.start("/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *settings, until=lambda: answers(port))
    trust = ["IdentityFile=" + str(place / "user"), "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
    ours = [word for option in trust for word in ("-o", option)]
    at = mounts.folder("mount")
    return [mounts.serve("sshfs", "-f", "-p", port, *ours, f"root@127.0.0.1:{below}", at, at=at)]


def _gocryptfs(mounts: Mounts) -> list[Path]:
    mounts.need("gocryptfs")
    below, at, password = mounts.folder("below"), mounts.folder("mount"), mounts.place / "password"
    password.write_text("password\n")
    mounts.call("gocryptfs", "-q", "-init", "-passfile", password, below)
    return [mounts.serve("gocryptfs", "-q", "-fg", "-passfile", password, below, at, at=at)]


def _cryfs(mounts: Mounts) -> list[Path]:
    mounts.need("cryfs")
    below, at = mounts.folder("below"), mounts.folder("mount")
    quiet = {"CRYFS_FRONTEND": "noninteractive", "CRYFS_NO_UPDATE_CHECK": "true", "HOME": str(mounts.folder("home"))}
    return [mounts.mount("cryfs", below, at, at=at, stdin="password\n", **quiet)]


def _glusterfs(mounts: Mounts) -> list[Path]:
    mounts.need("glusterd", "gluster", "glusterfs")
    brick, at = mounts.folder("brick"), mounts.folder("mount")
    mounts.start("glusterd", "-N", "-L", "WARNING", until=lambda: answers(24007))
    name = f"try{os.getpid()}"

    def drop() -> None:
        for verb in ("stop", "delete"):
            subprocess.run(
                ["gluster", "--mode=script", "volume", verb, name, *["force"][: verb == "stop"]], check=False
            )

    mounts.call("gluster", "--mode=script", "volume", "create", name, f"{socket.gethostname()}:{brick}", "force")
    mounts.callback(drop)
    mounts.call("gluster", "--mode=script", "volume", "start", name, "force")
    return [mounts.mount("mount", "-t", "glusterfs", f"{socket.gethostname()}:/{name}", at, at=at)]


def _s3fs(mounts: Mounts) -> list[Path]:
    mounts.need("s3fs")
    address, at, secret = mounts.bucket(), mounts.folder("mount"), mounts.place / "secret"
    secret.write_text("x:y")
    secret.chmod(0o600)
    options = f"passwd_file={secret},url={address},use_path_request_style"
    return [mounts.serve("s3fs", "bucket", at, "-f", "-o", options, at=at)]


def rclone(mode: str, *options: str, newer: bool = False) -> Callable[[Mounts], list[Path]]:
    """How to mount a bucket by rclone. ``newer``: by the one beside the S3 server, not by the system's."""

    def mount(mounts: Mounts) -> list[Path]:
        program = str(Path(moto_server()).with_name("rclone")) if newer else "rclone"
        mounts.need(program)
        address, at = mounts.bucket(), mounts.folder("mount")
        remote = {
            "RCLONE_CONFIG_STORE_TYPE": "s3",
            "RCLONE_CONFIG_STORE_PROVIDER": "Other",
            "RCLONE_CONFIG_STORE_ENDPOINT": address,
            "RCLONE_CONFIG_STORE_ACCESS_KEY_ID": "x",
            "RCLONE_CONFIG_STORE_SECRET_ACCESS_KEY": "y",
            "RCLONE_CONFIG": str(mounts.place / "none"),
            "RCLONE_CACHE_DIR": str(mounts.folder("cache")),
        }
        words = ["mount", "store:bucket", at, "--vfs-cache-mode", mode, *options]
        return [mounts.serve(program, *words, at=at, **remote)]

    return mount


RCLONE_MODES = ("off", "minimal", "writes", "full")
KINDS: dict[str, Callable[[Mounts], list[Path]]] = {
    "ext4": _ext4,
    "XFS": _xfs,
    "Btrfs": _btrfs,
    "overlayfs": _overlay,
    "fuse-overlayfs": _fuse_overlayfs,
    "mergerfs": _mergerfs,
    "unionfs-fuse": _unionfs,
    "bindfs, mounted twice": _bindfs,
    "sshfs": _sshfs,
    "gocryptfs": _gocryptfs,
    "CryFS": _cryfs,
    "GlusterFS": _glusterfs,
    "s3fs": _s3fs,
    **{f"rclone, {mode}": rclone(mode) for mode in RCLONE_MODES},
    **{f"newer rclone, {mode}": rclone(mode, newer=True) for mode in RCLONE_MODES},
}
"""For each file system, what mounts it: it returns the path of the mount, or two paths that lead to the same files."""


if __name__ == "__main__":  # to look at one: python mounting.py KIND FOLDER
    with Mounts(Path(sys.argv[2])) as mounts:
        print(*KINDS[sys.argv[1]](mounts), flush=True)
        sys.stdin.read()
