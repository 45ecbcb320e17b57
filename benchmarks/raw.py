"""The raw ceiling: what a plain C++ program reaches on the same file system with the same number of bytes."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

from measure import Sample, cores

_ROOT = Path(__file__).parent.parent
_PLACES = (_ROOT / "build" / "raw_io", _ROOT / ".whl" / "raw_io")
_CHUNKS = (4 << 20, 8 << 20, 16 << 20)
_DEPTHS = (8, 32)
_THREADS = (1, 2, 4, 8, 16)
TRIED = 2 * 10**9
"""Bytes with which the modes are tried, at most."""
Operation = Literal["write", "read", "restore"]
READERS: dict[str, Operation] = {"raw": "read", "raw restore": "restore"}
"""What the rows do that only read, by name."""
Mode = tuple[str, ...]


@dataclass(frozen=True)
class RawFiles:
    """Files of a fixed size that the raw program writes and reads, with one process for each file.

    Attributes:
        paths: Where the files are.
        nbytes: Bytes of all files together.
        direct: Whether to use io_uring with O_DIRECT, or else threads and the page cache.
    """

    paths: tuple[Path, ...]
    nbytes: int
    direct: bool = True

    def modes(self) -> list[Mode]:
        """The modes to try: chunk sizes and queue depths, or ways to copy and numbers of threads."""
        if self.direct:
            return [("direct", str(chunk), str(depth)) for chunk in _CHUNKS for depth in _DEPTHS]
        threads = [str(n) for n in _THREADS if n <= max(2, cores())]
        return [(how, n) for how in ("copy", "map") for n in threads]

    def remove(self) -> None:
        """Delete the files that exist."""
        for path in self.paths:
            path.unlink(missing_ok=True)

    def run(self, operation: Operation, mode: Mode) -> Sample:
        """Run all processes at once; the time is that of the slowest.

        Args:
            operation: "write" makes the files anew, durably. "read" and "restore" read all of them, from wherever they
                are: the caller decides what is in the page cache. "restore" also takes the checksum of each 256 KiB and
                copies it to other memory; it needs ``direct``.
            mode: How: one of :meth:`modes`.
        """
        if operation == "write":
            self.remove()
        each = str(-(-self.nbytes // len(self.paths)))
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(
                    subprocess.Popen(
                        [str(_program()), operation, str(path), each, *mode],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for path in self.paths
            ]
            heard = [_output(process).readline() for process in processes]
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()  # the processes begin when it closes
            figures = [_output(process).read().split() for process in processes]
        for process, first in zip(processes, heard, strict=True):
            if process.returncode or first != "ready\n":
                raise subprocess.CalledProcessError(process.returncode, process.args, first)
        return {
            "seconds": max(float(seconds) for seconds, _ in figures),
            "cpu_seconds": sum(float(cpu) for _, cpu in figures),
        }


def best_mode(files: RawFiles, operation: Operation, tried: int = TRIED) -> Mode:
    """Find the fastest mode of an operation: try each mode twice with at most ``tried`` bytes, then delete the files.

    Reads without O_DIRECT come from the page cache, as the files have just been written.
    """
    part = replace(files, nbytes=min(files.nbytes, tried))
    if operation != "write":
        part.run("write", part.modes()[0])
    best = min(part.modes(), key=lambda mode: min(part.run(operation, mode)["seconds"] for _ in range(2)))
    files.remove()
    return best


def reader_modes(files: RawFiles, tried: int = TRIED, *, restores: bool) -> dict[str, Mode]:
    """The fastest modes of the rows of :data:`READERS`; without ``restores``, of those that only read."""
    wanted = {name: operation for name, operation in READERS.items() if restores or operation == "read"}
    return {name: best_mode(files, operation, tried) for name, operation in wanted.items()}


def in_words(mode: Mode) -> str:
    """A mode in words, for the page."""
    if mode[0] == "direct":
        return f"io_uring, O_DIRECT, chunks of {int(mode[1]) >> 20} MiB, depth {mode[2]}"
    how = "pwrite or pread" if mode[0] == "copy" else "memcpy from and to a mapping of the file"
    return f"{mode[1]} threads of {how}"


def _output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _program() -> Path:
    for place in _PLACES:
        if place.exists():
            return place
    raise FileNotFoundError(f"there is no {_PLACES[0].relative_to(_ROOT)}: make it")
