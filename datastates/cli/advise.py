"""The command ``datastates advise``: says what the trace of a snapshot or of a run implies for the settings."""

from __future__ import annotations

import argparse

from pydantic import TypeAdapter, ValidationError

from datastates.cli.output import WrongCallError, print_json, say
from datastates.config import Duration
from datastates.executor.timeline import read_trace
from datastates.schedule.advice import advice

WHAT = "say what a trace implies: how often to save, how large a cache, and whether storage is the limit"


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        found = advice(read_trace(arguments.trace), arguments.mtbf)
    except ValueError as error:
        raise WrongCallError(f"{arguments.trace} is no trace of snapshots: {error}") from error
    if arguments.json:
        print_json({"ok": True, "advice": [one._asdict() for one in found]})
    else:
        for one in found:
            say(f"{one.about}: {one.text}")
    return 0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    command.add_argument(
        "trace", metavar="TRACE", help="a file that Snapshot.trace() or Checkpointer.trace() has written"
    )
    command.add_argument(
        "--mtbf", type=_duration, metavar="TIME", help="mean time between failures of the job, such as 6h"
    )


def _duration(text: str) -> float:
    try:
        return TypeAdapter(Duration).validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: seconds, or a number with s, min, h or d") from None
