"""The command ``datastates doctor``: tries whether a store is fit to save in."""

from __future__ import annotations

import argparse

from datastates.cli.arguments import as_location
from datastates.cli.output import WrongCallError, print_json, say
from datastates.commit import object_trial
from datastates.commit.tiers import tier_of
from datastates.errors import StorageError
from datastates.storage import Folders, store_of
from datastates.storage.bucket_rules import of_unfinished_uploads

WHAT = "try whether a store, such as a bucket, is fit to save in; exit 1 when it is not"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    what = "the address of a place in a store, such as s3://bucket/run; small objects are made there, and removed"
    command.add_argument("path", metavar="PATH", type=as_location, help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    path = arguments.path
    if isinstance(store_of(path), Folders):
        raise WrongCallError(f"{path} is no address of a store: folders are tried by each run that saves there")
    found: dict[str, tuple[bool | None, str]] = {}
    try:
        object_trial.refuse_overwriting(path)
        found["creates"] = True, "of several creates of one object, one succeeds"
    except StorageError as error:
        found["creates"] = False, str(error)
    left = len(tier_of(path).debris())
    found["debris"] = True, f"{left} left by interrupted runs; the next run that saves there removes them"
    found["unfinished uploads"] = of_unfinished_uploads(path)
    if arguments.json:
        print_json({name: {"ok": ok, "text": text} for name, (ok, text) in found.items()})
    else:
        for name, (ok, text) in found.items():
            say(f"{'ok' if ok else 'NOT OK' if ok is False else 'not known':9}  {name}: {text}")
    return 1 if any(ok is False for ok, _ in found.values()) else 0
