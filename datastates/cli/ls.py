"""The command ``datastates ls``: lists the checkpoints in a directory."""

from __future__ import annotations

import argparse
import contextlib
import time
from datetime import datetime, timezone
from typing import Any, NamedTuple

from datastates._base.tasks import each
from datastates.cli.arguments import as_location, as_seconds
from datastates.cli.output import WrongCallError, as_size, complain, flush, print_json, print_table, printable, say
from datastates.cli.sharing import Shared, common_nbytes, shared_files
from datastates.commit import directories, health, manifest, newest
from datastates.commit.tiers import tier_of
from datastates.errors import CheckpointNotFoundError, DatastatesError, FormatError, StorageError
from datastates.formats import recognise
from datastates.formats.recognise import Other
from datastates.formats.seen import Seen
from datastates.storage.location import Location

WHAT = "list the checkpoints in a directory, and what interrupted runs left there"
_AT_ONCE = 8
"""Checkpoints that are described at once."""
_ADDED, _METRIC = 4, 5
"""Columns that are shown where some row has them."""
_SECONDS = 2.0
"""Seconds from one look to the next, with ``--watch``."""


class _Listing(NamedTuple):
    """What a directory has: descriptions of checkpoints, names of debris and of entries without a manifest.

    ``others`` has each checkpoint of another format, or under another name than that of a step, by name.
    """

    found: list[dict[str, Any]]
    left: list[str]
    foreign: list[str]
    others: dict[str, Other]


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status. With ``--watch``, it ends by an interrupt only."""
    listing = _look(arguments)
    _print(listing, arguments)
    while arguments.watch:
        flush()
        time.sleep(_SECONDS)
        if (now := _look(arguments)) != listing:
            listing = now
            say("")
            _print(listing, arguments)
    if not any(listing):
        return 2
    is_recent = arguments.newest_within is None or _is_recent(listing.found, arguments.newest_within)
    return 0 if is_recent and not any("error" in e for e in listing.found) else 1


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    command.add_argument("path", metavar="PATH", type=as_location, help="a directory of checkpoints, or a checkpoint")
    command.add_argument("--watch", action="store_true", help="list again whenever something has changed, until Ctrl-C")

    what = "show, too, how many bytes each checkpoint has that none before it shares with it on the disk"
    command.add_argument("--added", action="store_true", help=what)
    what = "exit 1 if the newest whole checkpoint is older than TIME, such as 30min or 2h"
    command.add_argument("--newest-within", metavar="TIME", type=as_seconds, help=what)


def _is_recent(found: list[dict[str, Any]], most: float) -> bool:
    """Whether the newest whole checkpoint was committed in the last ``most`` seconds; if not, says so."""
    newest_whole = next((e for e in reversed(found) if "error" not in e), None)
    if newest_whole is None:
        complain("no checkpoint is whole")
        return False
    with contextlib.suppress(ValueError):  # no date
        made = datetime.fromisoformat(newest_whole["created"]).astimezone(timezone.utc)
        if (datetime.now(timezone.utc) - made).total_seconds() <= most:
            return True
    complain(f"the newest whole checkpoint, {newest_whole['name']}, is of {newest_whole['created']}")
    return False


def _look(arguments: argparse.Namespace) -> _Listing:
    path: Location = arguments.path
    seen = Seen(path)
    kind = recognise.recognise(seen)
    if arguments.added and kind is not None:
        raise WrongCallError("--added compares the checkpoints of a directory: give that directory")
    if seen.has_manifest:
        return _Listing([_describe(path)], [], [], {})
    if kind is not None:
        return _Listing([], [], [], {path.name or str(path): recognise.describe(path, kind)})
    if not seen.is_folder:
        raise CheckpointNotFoundError(f"{path} is {recognise.what_is(seen) or 'neither a directory nor a checkpoint'}")
    tier, found = tier_of(path), []
    with tier.listed_once():
        every, hidden, debris = tier.checkpoints(), tier.hidden(), tier.debris()
    known = {one.path.name for one in every} | hidden
    by_age = newest.oldest_first(every)
    described = each(_describe, [*by_age.values()], _AT_ONCE)
    for age, (step, one) in enumerate(zip(by_age, described, strict=True)):
        later = next((other for other in list(by_age)[age + 1 :] if other < step), None)
        found.append({**one, "step": step, "superseded_by": later})
    if arguments.added:
        _add_added(found, path)
    left = [one.name for one in debris]
    foreign = [one.name for one in directories.without_manifest(path, {*seen.names} - known)]
    others = {}
    for name, other in recognise.others(path, {*seen.names} - {*known, *left, *foreign}).items():
        with contextlib.suppress(StorageError):  # it was deleted meanwhile
            others[name] = recognise.describe(path / name, other)
    in_order = sorted(others.items(), key=lambda item: (item[1].step is None, item[1].step or 0, item[0]))
    return _Listing(found, left, foreign, dict(in_order))


def _add_added(found: list[dict[str, Any]], path: Location) -> None:
    """Add to each description the bytes that no checkpoint before it has in the same place; None if unknown."""
    before: list[Shared] = []
    for entry in found:
        entry["added"] = None
        with contextlib.suppress(DatastatesError):
            if (known := shared_files(path / entry["name"])) is not None:
                entry["added"] = sum(file.nbytes for file in known.values()) - common_nbytes(known, before)
                before.append(known)


def _print(listing: _Listing, arguments: argparse.Namespace) -> None:
    found, left, foreign, others = listing
    if arguments.json:
        listed = [
            {"name": name, "format": one.format, "step": one.step, "changed": _date(one.changed), "bytes": one.nbytes}
            for name, one in others.items()
        ]
        print_json({"checkpoints": found, "debris": left, "without_manifest": foreign, "others": listed})
    elif any(listing):
        rows = [["STEP", "CREATED", "RANKS", "SIZE", "ADDED", "METRIC", "NAME", ""], *map(_row, found)]
        rows += [["-", "debris", "", "", "", "", name, ""] for name in left]
        rows += [["-", "", "", "", "", "", name, "no checkpoint: it has no manifest.json"] for name in foreign]
        for name, one in others.items():
            step = "-" if one.step is None else str(one.step)
            rows.append([step, _date(one.changed), "", as_size(one.nbytes), "", "", printable(name), one.format])
        hidden = {
            column
            for column, key in ((_ADDED, "added"), (_METRIC, "metric"))
            if all(one.get(key) is None for one in found)
        }
        shown = [i for i in range(len(rows[0])) if i not in hidden]
        numbers = tuple(shown.index(i) for i in (0, 2, 3, _ADDED, _METRIC) if i in shown)
        print_table([[row[i] for i in shown] for row in rows], numbers=numbers)
    else:
        say(f"no checkpoints in {arguments.path}")


def _date(nanoseconds: int) -> str:
    """A time as manifests have it."""
    return datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc).isoformat(timespec="seconds")


def _describe(path: Location) -> dict[str, Any]:
    """Describe a checkpoint directory for the output: the facts in its manifest, and the checkpoint's fault, if any."""
    entry: dict[str, Any] = {"step": None, "name": path.name or str(path), "superseded_by": None}
    opened = None
    with contextlib.suppress(FormatError, StorageError):  # reported below
        opened = manifest.open(path)
        entry |= {
            "step": opened.step,
            "created": opened.created,
            "ranks": opened.world_size,
            "bytes": opened.nbytes,
            "metric": opened.metric,
        }
    if (what := health.problem(path, opened)) is not None:
        entry["error"] = what
    return entry


def _row(entry: dict[str, Any]) -> list[str]:
    facts = ["", "", "", "", ""]
    if "created" in entry:
        metric = "" if entry["metric"] is None else f"{entry['metric']:.6g}"
        added = "" if entry.get("added") is None else as_size(entry["added"])
        facts = [printable(entry["created"]), str(entry["ranks"]), as_size(entry["bytes"]), added, metric]
    later = entry["superseded_by"]
    rolled = "" if later is None else f"superseded by step {later}, after a roll-back"
    note = f"damaged: {printable(entry['error'])}" if "error" in entry else rolled
    step = "-" if entry["step"] is None else str(entry["step"])
    return [step, *facts, printable(entry["name"]), note]
