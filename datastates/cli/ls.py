"""The command ``datastates ls``: lists the checkpoints in a directory."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from datastates.cli.output import print_json, printable, say
from datastates.cli.show import as_size, print_table
from datastates.commit import directories, health, manifest, newest
from datastates.commit.directory_tier import tier_of
from datastates.errors import CheckpointNotFoundError, FormatError, StorageError
from datastates.formats import own, recognise
from datastates.storage import store_of
from datastates.storage.location import Location


def ls(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    path: Location = arguments.path
    kind = recognise.recognise(path)
    found: list[dict[str, Any]] = []
    left: list[str] = []
    foreign: list[str] = []
    others: dict[str, str] = {}
    if kind is own and store_of(path).is_folder(path):
        found = [_describe(path)]
    elif kind is not None:
        others = {path.name or str(path): kind.NAME}
    elif store_of(path).is_folder(path):
        tier = tier_of(path)
        by_age = newest.by_age(tier)
        for age, (step, one) in enumerate(by_age.items()):
            later = next((other for other in list(by_age)[age + 1 :] if other < step), None)
            found.append({**_describe(one), "step": step, "superseded_by": later})
        left = [one.name for one in tier.debris()]
        foreign = [one.name for one in directories.without_manifest(path)]
        others = recognise.others(path, {*(one.name for one in directories.steps(path)), *left, *foreign})
    else:
        raise CheckpointNotFoundError(f"{path} is neither a directory nor a checkpoint")
    if arguments.json:
        listed = [{"name": name, "format": what} for name, what in others.items()]
        print_json({"checkpoints": found, "debris": left, "without_manifest": foreign, "others": listed})
    elif found or left or foreign or others:
        rows = [["STEP", "CREATED", "RANKS", "SIZE", "NAME", ""], *map(_row, found)]
        rows += [["-", "debris", "", "", name, ""] for name in left]
        rows += [["-", "", "", "", name, "no checkpoint: it has no manifest.json"] for name in foreign]
        rows += [["-", "", "", "", printable(name), what] for name, what in others.items()]
        print_table(rows, numbers=(0, 2, 3))
    else:
        say(f"no checkpoints in {path}")
    if not (found or left or foreign or others):
        return 2
    return 1 if any("error" in e for e in found) else 0


def _describe(path: Location) -> dict[str, Any]:
    """Describe a checkpoint directory for the output: the facts in its manifest, and the checkpoint's fault, if any."""
    entry: dict[str, Any] = {"step": None, "name": path.name or str(path), "superseded_by": None}
    with contextlib.suppress(FormatError, StorageError):  # reported below
        opened = manifest.open(path)
        entry |= {
            "step": opened.step,
            "created": opened.created,
            "ranks": opened.world_size,
            "bytes": opened.nbytes,
        }
    if (what := health.problem(path)) is not None:
        entry["error"] = what
    return entry


def _row(entry: dict[str, Any]) -> list[str]:
    size = (
        [printable(entry["created"]), str(entry["ranks"]), as_size(entry["bytes"])]
        if "created" in entry
        else ["", "", ""]
    )
    later = entry["superseded_by"]
    rolled = "" if later is None else f"superseded by step {later}, after a roll-back"
    note = f"damaged: {printable(entry['error'])}" if "error" in entry else rolled
    step = "-" if entry["step"] is None else str(entry["step"])
    return [step, *size, printable(entry["name"]), note]
