"""The command ``datastates fetch``: brings one checkpoint to another place, such as from a bucket to a local disk."""

from __future__ import annotations

import argparse

from datastates.cli import drain

WHAT = "bring the newest checkpoint to another place, such as from a bucket to a disk, each byte checked"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    drain.add_arguments(command, steps="the newest")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    return drain.bring(arguments, only_newest=True)
