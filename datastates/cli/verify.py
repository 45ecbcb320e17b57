"""The command ``datastates verify``: reads every byte of a checkpoint and compares it with its checksum."""

from __future__ import annotations

import argparse

from datastates.cli import output
from datastates.cli.arguments import add_checkpoint
from datastates.cli.output import IN_SHELL, as_key, as_size, print_json, progress_bar, say
from datastates.commit import health
from datastates.commit.tiers import tier_of
from datastates.errors import DatastatesError
from datastates.formats import own, recognise
from datastates.formats.format import Opened, Problem

WHAT = "read every byte of a checkpoint and check it; exit 1 when one is wrong"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    add_checkpoint(command, "path")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    problems: list[Problem] = []
    opened: Opened | None = None
    nbytes, damage = 0, None
    try:
        with recognise.opened(arguments.path, arguments.step, IN_SHELL) as opened:
            nbytes = opened.nbytes
            with progress_bar("verify", quiet=arguments.json) as advance:
                problems += opened.verify(lambda now: advance(now, nbytes))
    except DatastatesError as error:
        if not health.is_damage(error):
            raise
        damage = error
    path = arguments.path if opened is None else opened.tensors.path
    step = None if opened is None else opened.tensors.step
    if arguments.json:
        found = [{"file": str(p.path), "key": p.key, "problem": p.what} for p in problems]
        if damage is not None:  # it could not be read on
            file = damage.filename if isinstance(damage, OSError) and damage.filename else str(path)
            found.append({"file": file, "key": "", "problem": str(damage)})
        whole = {"ok": not found, "format": None if opened is None else opened.format, "path": str(path), "step": step}
        print_json({**whole, "bytes": nbytes, "problems": found})
    for p in () if arguments.json else problems:
        say(f"{as_key(p.key)} in {p.path} {p.what}")
    if damage is not None:
        output.complain(str(damage))
    elif problems and arguments.step is None and path != arguments.path:
        if advice := health.older(tier_of(path.parent), path, IN_SHELL):
            output.complain(advice)
    elif opened is not None and not (arguments.json or problems):
        what = [*([] if opened.format == own.NAME else [opened.format]), *([] if step is None else [f"step {step}"])]
        what.append(f"{as_size(nbytes)} in {len(opened.files)} file(s)")
        say(f"{path}: {', '.join(what)}, {opened.proof}")
    return 1 if problems or damage else 0
