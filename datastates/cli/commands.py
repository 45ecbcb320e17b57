"""The command line: ``datastates ls|inspect|verify|diff|export``. Only ``export`` imports a framework."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from datastates._base import paths
from datastates.cli import export
from datastates.cli.compare import Comparison, compare
from datastates.cli.inspect import inspect
from datastates.cli.ls import ls
from datastates.cli.progress import progress_bar
from datastates.cli.show import as_size, print_json, printable
from datastates.errors import CheckpointNotFoundError, DatastatesError
from datastates.formats import own, recognise

STATUS = "exit status: 0 all is well; 1 something is damaged, differs or failed; 2 a wrong call, or nothing to look at"
_SOURCE = "a checkpoint, a directory of them (the newest), or a file or folder of another format"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, as :data:`STATUS` says."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except DatastatesError as error:
        print(f"datastates: {error}", file=sys.stderr)
        return 2 if isinstance(error, CheckpointNotFoundError) else 1
    except BrokenPipeError:
        # the reader of our output has closed it; keep the interpreter from writing the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="datastates", description="Look at checkpoints.", epilog=STATUS)
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('datastates')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    what = "list the checkpoints in a directory, and what interrupted runs left there"
    command = _add(commands, "ls", ls, what)
    command.add_argument("path", metavar="PATH", type=_path, help="a directory of checkpoints, or a checkpoint")
    what = "show what a checkpoint holds: keys, types, shapes, sizes, places"
    command = _add(commands, "inspect", inspect, what)
    command.add_argument("path", metavar="PATH", type=_path, help=_SOURCE)
    command.add_argument("--keys", metavar="GLOB", default="*", help="only keys that match, as of a shell")
    what = "read every byte of a checkpoint and check it; exit 1 when one is wrong"
    command = _add(commands, "verify", _verify, what)
    command.add_argument("path", metavar="PATH", type=_path, help=_SOURCE)
    what = "compare two checkpoints by their digests; exit 1 when they differ, 2 when they cannot be compared"
    command = _add(commands, "diff", _diff, what)
    for name in ("A", "B"):
        command.add_argument(name, type=_path, help="as for inspect")
    command = _add(commands, "export", export.export, export.WHAT)
    command.add_argument("source", metavar="SOURCE", type=_path, help=_SOURCE)
    export.add_arguments(command, _path)
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
    """Add a command, which ``run`` carries out and ``what`` describes."""
    description = f"{what[0].upper()}{what[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=what, description=description, epilog=STATUS)
    command.add_argument("--json", action="store_true", help="print JSON for programs")
    command.set_defaults(run=run)
    return command


def _path(text: str) -> Path:
    try:
        paths.refuse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def _verify(arguments: argparse.Namespace) -> int:
    with recognise.kept(arguments.path) as (kind, path):
        opened = kind.open(path)
        nbytes = opened.nbytes
        with progress_bar("verify", quiet=arguments.json) as advance:
            problems = list(opened.verify(lambda now: advance(now, nbytes)))
    step = opened.tensors.step
    if arguments.json:
        found = [{"file": str(p.path), "key": p.key, "problem": p.what} for p in problems]
        whole = {"ok": not problems, "format": kind.NAME, "path": str(path), "step": step, "bytes": nbytes}
        print_json({**whole, "problems": found})
    else:
        for p in problems:
            print(f"{printable(p.key)} in {p.path} {p.what}")
        if not problems:
            what = [*([] if kind is own else [kind.NAME]), *([] if step is None else [f"step {step}"])]
            print(f"{path}: {', '.join(what)}, {as_size(nbytes)} in {len(opened.files)} file(s), {opened.proof}")
    return 1 if problems else 0


def _diff(arguments: argparse.Namespace) -> int:
    try:
        with recognise.kept(arguments.A) as (kind_a, a), recognise.kept(arguments.B) as (kind_b, b):
            found = compare(kind_a.open(a).files, kind_b.open(b).files)
    except DatastatesError as error:
        print(f"datastates: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print_json(
            {
                "equal": found.is_equal,
                "only_a": found.only_a,
                "only_b": found.only_b,
                "descriptions": [{"key": key, "a": a, "b": b} for key, a, b in found.descriptions],
                "contents": found.contents,
                "alike": found.equal,
                "bytes_read": found.read,
            }
        )
    else:
        _print_differences(found, str(arguments.A), str(arguments.B))
    return 0 if found.is_equal else 1


def _print_differences(found: Comparison, a: str, b: str) -> None:
    for where, keys in ((a, found.only_a), (b, found.only_b)):
        for key in keys:
            print(f"{printable(key)} is only in {where}")
    for key, one, other in found.descriptions:
        print(f"{printable(key)} is {one} in {a}, {other} in {b}")
    for key in found.contents:
        print(f"{printable(key)} differs")
    only = len(found.only_a) + len(found.only_b)
    print(
        f"{found.equal} alike, {len(found.contents)} of other contents, {len(found.descriptions)} of another type or "
        f"shape, {only} in one of them only"
    )
