"""Prints results to standard output and the rest to standard error. Either may be closed, full, or ASCII."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
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
