"""The command ``datastates verify``: reads every byte of a checkpoint and compares it with its checksum."""

from __future__ import annotations

import argparse
from collections.abc import Hashable
from typing import Any

from datastates.cli import output
from datastates.cli.arguments import add_checkpoint
from datastates.cli.output import IN_SHELL, WrongCallError, as_key, as_size, print_json, progress_bar, say
from datastates.commit import health
from datastates.commit.newest import in_order
from datastates.commit.tiers import tier_of
from datastates.errors import CheckpointNotFoundError, DatastatesError
from datastates.formats import own, recognise
from datastates.formats.format import Opened, Problem
from datastates.formats.seen import Seen
from datastates.storage.location import Location

WHAT = "read every byte of a checkpoint and check it; exit 1 when one is wrong"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    add_checkpoint(command, "path")
    what = "verify each checkpoint of the directory, the newest first; files that several of them share are read once"
    command.add_argument("--all", action="store_true", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if not arguments.all:
        found = _verified(arguments.path, arguments.step, is_quiet=arguments.json)
        if arguments.json:
            print_json(found)
        return 0 if found["ok"] else 1
    if arguments.step is not None or recognise.recognise(Seen(arguments.path)) is not None:
        raise WrongCallError("--all verifies the checkpoints of a directory: give that directory, and no --step")
    every, seen = [], set[Hashable]()
    for one in reversed(in_order(tier_of(arguments.path).checkpoints())):
        try:
            every.append(_verified(one.path, None, is_quiet=arguments.json, seen=seen))
        except CheckpointNotFoundError:  # it was deleted meanwhile
            pass
        except DatastatesError as error:  # the others are told all the same
            output.complain(str(error))
            told = {"file": str(one.path), "key": "", "problem": str(error)}
            which = {"format": own.NAME, "path": str(one.path), "step": one.step}
            every.append({"ok": False, **which, "bytes": 0, "problems": [told]})
    if not every:
        raise CheckpointNotFoundError(f"no checkpoint is in {arguments.path}")
    is_ok = all(one["ok"] for one in every)
    if arguments.json:
        print_json({"ok": is_ok, "checkpoints": every})
    return 0 if is_ok else 1


def _verified(
    given: Location, wanted: int | None, *, is_quiet: bool, seen: set[Hashable] | None = None
) -> dict[str, Any]:
    """Verify one checkpoint; returns what the command tells as JSON, and says it unless ``is_quiet``."""
    problems: list[Problem] = []
    opened: Opened | None = None
    nbytes, damage = 0, None
    try:
        with recognise.opened(given, wanted, IN_SHELL) as opened:
            nbytes = opened.nbytes
            with progress_bar("verify", quiet=is_quiet) as advance:
                ours = {"seen": seen} if isinstance(opened, own.OwnCheckpoint) else {}
                problems += opened.verify(lambda now: advance(now, nbytes), **ours)
    except DatastatesError as error:
        if not health.is_damage(error):
            raise
        damage = error
    path = given if opened is None else opened.tensors.path
    step = None if opened is None else opened.tensors.step
    found = [{"file": str(p.path), "key": p.key, "problem": p.what} for p in problems]
    if damage is not None:  # it could not be read on
        file = damage.filename if isinstance(damage, OSError) and damage.filename else str(path)
        found.append({"file": file, "key": "", "problem": str(damage)})
    if not is_quiet:
        for p in problems:
            say(f"{as_key(p.key)} in {p.path} {p.what}")
    if damage is not None:
        output.complain(str(damage))
    elif problems and wanted is None and path != given:
        if advice := health.older(tier_of(path.parent), path, IN_SHELL):
            output.complain(advice)
    elif opened is not None and not (is_quiet or problems):
        what = [*([] if opened.format == own.NAME else [opened.format]), *([] if step is None else [f"step {step}"])]
        what.append(f"{as_size(nbytes)} in {len(opened.files)} file(s)")
        say(f"{path}: {', '.join(what)}, {opened.proof}")
    whole = {"ok": not found, "format": None if opened is None else opened.format, "path": str(path), "step": step}
    return {**whole, "bytes": nbytes, "problems": found}
