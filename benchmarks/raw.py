"""The raw ceiling: what a plain C++ program reaches on the same file system with the same number of bytes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from measure import Sample, cores

_ROOT = Path(__file__).parent.parent
_PLACES = (_ROOT / "build" / "raw_io", _ROOT / ".whl" / "raw_io")
_CHUNKS = (4 << 20, 8 << 20, 16 << 20)
_DEPTHS = (8, 32)
_THREADS = (1, 2, 4, 8, 16)
_TUNED = 2 * 10**9
"""Bytes with which the modes are tried."""


@dataclass(frozen=True)
class RawFile:
    """A file that the program writes and reads, always the same number of bytes.

    Attributes:
        path: Where.
        nbytes: How many.
        direct: io_uring with O_DIRECT, or threads through the page cache.
    """

    path: Path
    nbytes: int
    direct: bool = True

    def modes(self) -> list[tuple[str, ...]]:
        """The ways to try: chunk and depth, or numbers of threads."""
        if self.direct:
            return [("direct", str(chunk), str(depth)) for chunk in _CHUNKS for depth in _DEPTHS]
        threads = [str(n) for n in _THREADS if n <= max(2, cores())]
        return [(how, n) for how in ("copy", "map") for n in threads]

    def write(self, mode: tuple[str, ...]) -> Sample:
        """Write it anew, durably."""
        self.path.unlink(missing_ok=True)
        return self._run("write", mode)

    def read(self, mode: tuple[str, ...]) -> Sample:
        """Read all of it; what is in the page cache is the caller's choice."""
        return self._run("read", mode)

    def _run(self, operation: str, mode: tuple[str, ...]) -> Sample:
        command = [str(_program()), operation, str(self.path), str(self.nbytes), *mode]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds, cpu = map(float, done.stdout.split())
        return {"seconds": seconds, "cpu_seconds": cpu}


def best_modes(file: RawFile) -> dict[str, tuple[str, ...]]:
    """The fastest mode to ``write`` and to ``read`` a file, each tried twice on its first part.

    A file read without O_DIRECT is read from the page cache, as it has just been written.
    """
    part = replace(file, nbytes=min(file.nbytes, _TUNED))
    best = {}
    for operation in ("write", "read"):
        run = getattr(part, operation)
        best[operation] = min(file.modes(), key=lambda mode: min(run(mode)["seconds"] for _ in range(2)))
    file.path.unlink()
    return best


def in_words(mode: tuple[str, ...]) -> str:
    """A mode, for the page."""
    if mode[0] == "direct":
        return f"io_uring, O_DIRECT, chunks of {int(mode[1]) >> 20} MiB, depth {mode[2]}"
    how = "pwrite or pread" if mode[0] == "copy" else "memcpy from and to a mapping of the file"
    return f"{mode[1]} threads of {how}"


def _program() -> Path:
    for place in _PLACES:
        if place.exists():
            return place
    raise FileNotFoundError(f"there is no {_PLACES[0].relative_to(_ROOT)}: make it")
