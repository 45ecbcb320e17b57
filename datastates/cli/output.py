"""Prints results to standard output, as text or JSON, and the rest to standard error. Either may be closed or full."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

SCHEMA = 1
"""The version of the JSON output. It increases when a field changes its meaning or is removed."""


class OutputError(Exception):
    """Standard output cannot be written."""


class WrongCallError(Exception):
    """The arguments are impossible."""


def prepare() -> None:
    """Let standard output and error take every text: characters that their encoding lacks are escaped.

    Raises:
        OutputError: Standard output is closed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        raise OutputError("standard output is closed")


def say(text: str) -> None:
    """Print a line of the result; raises OutputError."""
    _write(text, flush=False)


def print_json(value: dict[str, Any]) -> None:
    """Print a value as JSON, with the schema number; raises OutputError."""
    _write(json.dumps({"schema": SCHEMA, **value}, indent=2), flush=True)


def flush() -> None:
    """Write buffered output now; raises OutputError."""
    _write("", flush=True, end="")


def finish() -> None:
    """Empty the buffers of both streams for the interpreter's exit. What cannot be written is lost."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                _abandon(stream)


def _write(text: str, *, flush: bool, end: str = "\n") -> None:
    try:
        print(text, end=end, flush=flush)
    except OSError as error:
        _abandon(sys.stdout)
        raise OutputError(f"standard output: {error.strerror}") from error


def complain(text: str) -> None:
    """Print an error for people to standard error, as far as it can be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # the call has failed anyway, and its status says so
            for line in text.splitlines():
                print(f"datastates: {printable(line)}", file=sys.stderr, flush=True)


def _abandon(stream: TextIO) -> None:
    """Drop what a stream's buffer still has: the interpreter would try to write it at its exit, and exit with 120."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def as_key(key: str) -> str:
    """A full key as text. Empty is the key of a value that is all of a checkpoint."""
    return printable(key) or "(the value)"


def printable(text: str) -> str:
    """A text with control characters escaped, because they could control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


IN_SHELL = "take it with --step {step}"
"""Advice in the shell on how to take another step; :func:`datastates.formats.recognise.opened` gives it."""
_WIDEST = 80


def print_table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
    """Print rows of equal length in aligned columns; the columns in ``numbers`` are aligned to the right."""
    # a cell that is wider than this sticks out, and does not widen its column
    widths = [max((n for row in rows if (n := len(row[i])) <= _WIDEST), default=0) for i in range(len(rows[0]))]
    for row in rows:
        cells = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        say("  ".join(cells).rstrip())


def as_size(nbytes: int) -> str:
    """A number of bytes as text, in the largest unit that gives at least 1."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def as_part(part: Mapping[str, Any], shape: Sequence[int]) -> str:
    """Describe a part of a tensor of ``shape`` as text."""
    if part["shape"] == shape:
        return "all"
    if part["flat"] is not None:
        return f"elements {part['flat'][0]}:{part['flat'][1]}"
    sides = zip(part["box"], part["shape"], strict=True)
    return f"[{', '.join(f'{begin}:{begin + length}' for begin, length in sides)}]"


def as_shape(shape: Sequence[int]) -> str:
    """A shape as text, such as ``2x3``."""
    return "x".join(map(str, shape)) if shape else "scalar"


@contextlib.contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, if tqdm is installed (the ``cli`` extra).

    Yields:
        A function to call with a number of bytes that are done now, and the number of all bytes.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda nbytes, total: None
        return
    # None: no bar where standard error is no terminal
    with tqdm(total=0, unit="B", unit_scale=True, desc=what, disable=quiet or sys.stderr is None or None) as bar:

        def advance(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        yield advance
