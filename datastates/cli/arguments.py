"""Arguments that several commands have."""

from __future__ import annotations

import argparse

from datastates.commit.names import checked_step
from datastates.config import seconds
from datastates.storage import Location, store_of


def as_location(text: str) -> Location:
    """The type of arguments that are paths or addresses; raises argparse.ArgumentTypeError if no store serves one."""
    try:
        store_of(path := Location(text))
        return path
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_checkpoint(command: argparse.ArgumentParser, name: str) -> None:
    """Add the argument ``name`` for a checkpoint, and the option ``--step``."""
    what = "a checkpoint, a directory of them (the newest), or a file or folder of another format"
    command.add_argument(name, metavar=name.upper(), type=as_location, help=what)
    add_step(command)


def add_step(
    command: argparse.ArgumentParser, what: str = "the step in a directory of checkpoints; default: the newest"
) -> None:
    """Add the option ``--step``."""
    command.add_argument("--step", type=_step, metavar="N", help=what)


def as_seconds(text: str) -> float:
    """The type of arguments that are times; raises argparse.ArgumentTypeError for anything else."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _step(text: str) -> int:
    try:
        return checked_step(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no step: an integer from 0 on") from None
