"""The command ``datastates drain``: brings checkpoints to another place."""

from __future__ import annotations

import argparse
from functools import partial

from datastates.cli import output
from datastates.cli.arguments import add_step, as_location
from datastates.cli.output import IN_SHELL, WrongCallError, print_json, progress_bar, say
from datastates.commit import health
from datastates.commit.tiers import tier_of
from datastates.draining import folders_by_hand
from datastates.draining.by_hand import bring_each, lacking
from datastates.errors import CheckpointNotFoundError, FormatError

WHAT = "bring all checkpoints that another place lacks there, each byte checked; exit 1 when one is damaged"


def add_arguments(command: argparse.ArgumentParser, *, steps: str = "all steps") -> None:
    """Add the arguments to the command's parser; ``steps``: what is brought without ``--step``."""
    what = "a checkpoint, or a directory of them, such as /nvme/run or s3://bucket/run"
    command.add_argument("source", metavar="SOURCE", type=as_location, help=what)
    command.add_argument("target", metavar="TARGET", type=as_location, help="the place for them, of either kind")
    add_step(command, f"only this step; default: {steps}")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    return bring(arguments)


def _bringing(arguments: argparse.Namespace, *, only_newest: bool) -> folders_by_hand.Bring:
    """What brings the checkpoints of this package or, where there are none, those of frameworks."""
    source, target, step = arguments.source, arguments.target, arguments.step
    look = partial(lacking, source, target, step, only_newest=only_newest)
    try:
        paths = look()
    except FormatError:  # a ValueError, too
        raise
    except (CheckpointNotFoundError, ValueError):
        copies = folders_by_hand.fetching(source, target, step, only_newest=only_newest)
        if (bring := copies or folders_by_hand.sending(source, target, step)) is None:
            raise
        return bring
    return partial(bring_each, paths, target, again=look)


def bring(arguments: argparse.Namespace, *, only_newest: bool = False) -> int:
    """Bring what the target of the arguments lacks, and print what has become of each; returns the exit status."""
    done = []
    try:
        each = _bringing(arguments, only_newest=only_newest)
    except FormatError:  # a ValueError, too
        raise
    except ValueError as error:
        raise WrongCallError(str(error)) from error
    with progress_bar("bring", quiet=arguments.json) as progress:
        for one in each(progress):
            done.append(one)
            if one.damage is not None:
                output.complain(str(one.damage))
                if only_newest and (advice := health.older(tier_of(one.source.parent), one.source, IN_SHELL)):
                    output.complain(advice)
            elif not arguments.json:
                say(f"{one.source} is in {one.path}")
    if arguments.json:
        every = [
            {
                "source": str(one.source),
                "path": None if one.path is None else str(one.path),
                "problem": None if one.damage is None else str(one.damage),
            }
            for one in done
        ]
        print_json({"ok": all(one.damage is None for one in done), "checkpoints": every})
    elif not done:
        say(f"{arguments.target} has them all")
    return 1 if any(one.damage is not None for one in done) else 0
