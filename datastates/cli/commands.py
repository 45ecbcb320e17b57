"""The command line: ``datastates ls`` and so on. Only ``export``, and ``diff --values``, import a framework."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NoReturn

from datastates import _calls
from datastates.cli import advise, completion, export, ls, output, timeline
from datastates.cli.diff import diff
from datastates.cli.inspect import inspect
from datastates.cli.output import OutputError, WrongCallError, print_json, printable, say
from datastates.cli.progress import progress_bar
from datastates.cli.show import IN_SHELL, as_size
from datastates.commit import health
from datastates.commit.names import checked_step
from datastates.errors import CheckpointNotFoundError, DatastatesError
from datastates.formats import own
from datastates.formats.format import Opened, Problem
from datastates.storage import location
from datastates.storage.location import Location

STATUS = "exit status: 0 all is well; 1 something is damaged, differs or failed; 2 a wrong call, or nothing to look at"
_SOURCE = "a checkpoint, a directory of them (the newest), or a file or folder of another format"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, as :data:`STATUS` says."""
    given = sys.argv[1:] if argv is None else argv
    try:
        output.prepare()
        return _run(given)
    except OutputError as error:
        if not isinstance(error.__cause__, BrokenPipeError):  # that is a reader who has seen enough
            output.complain(str(error))
        return 1
    except KeyboardInterrupt:
        output.complain("interrupted")
        return 128 + signal.SIGINT


def _run(given: Sequence[str]) -> int:
    try:
        arguments = _parser().parse_args(given)
    except SystemExit:  # of --help and --version
        output.flush()
        raise
    except WrongCallError as error:
        _tell(error, as_json="--json" in given)
        raise SystemExit(2) from None
    try:
        status: int = arguments.run(arguments)
        output.flush()
        return status
    except (CheckpointNotFoundError, WrongCallError) as error:
        _tell(error, as_json=arguments.json)
        return 2
    except (DatastatesError, OSError, ImportError) as error:
        _tell(error, as_json=arguments.json)
        return 2 if arguments.run is diff else 1


def _tell(error: Exception, *, as_json: bool) -> None:
    """Print an error for people and, with ``--json``, for programs."""
    if as_json:
        output.print_json({"ok": False, "error": {"kind": type(error).__name__, "message": str(error)}})
    output.complain(str(error))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise WrongCallError."""
        raise WrongCallError(f"{message}; {' '.join(self.format_usage().split())}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="datastates", description="Look at checkpoints.", epilog=STATUS)
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('datastates')}")
    completion.add_argument(parser, _path)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ls.add_arguments(_add(commands, "ls", ls.ls, ls.WHAT), _path)
    what = "show what a checkpoint holds: keys, types, shapes, sizes, places"
    command = _add(commands, "inspect", inspect, what)
    command.add_argument("path", metavar="PATH", type=_path, help=_SOURCE)
    _add_step(command)
    command.add_argument("--keys", metavar="GLOB", default="*", help="only keys that match, as of a shell")
    what = "read every byte of a checkpoint and check it; exit 1 when one is wrong"
    command = _add(commands, "verify", _verify, what)
    command.add_argument("path", metavar="PATH", type=_path, help=_SOURCE)
    _add_step(command)
    what = "compare two checkpoints by their digests; exit 1 when they differ, 2 when they cannot be compared"
    command = _add(commands, "diff", diff, what)
    for name in ("A", "B"):
        command.add_argument(name, type=_path, help="as for inspect")
    _add_step(command)
    what = "read the tensors of other contents, and say how many elements differ, and how far"
    command.add_argument("--values", action="store_true", help=what)
    command = _add(commands, "export", export.export, export.WHAT)
    command.add_argument("source", metavar="SOURCE", type=_path, help=_SOURCE)
    _add_step(command)
    export.add_arguments(command, _path)
    timeline.add_arguments(_add(commands, "timeline", timeline.timeline, timeline.WHAT), _path)
    advise.add_arguments(_add(commands, "advise", advise.advise, advise.WHAT))
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
    """Add the parser of a command ``name``; ``run`` carries the command out, ``what`` describes it."""
    description = f"{what[0].upper()}{what[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=what, description=description, epilog=STATUS)
    command.add_argument("--json", action="store_true", help="print JSON for programs")
    command.set_defaults(run=run)
    return command


def _add_step(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--step", type=_step, metavar="N", help="the step in a directory of checkpoints; default: the newest"
    )


def _step(text: str) -> int:
    try:
        return checked_step(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no step: an integer from 0 on") from None


def _path(text: str) -> Location:
    try:
        location.refuse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Location(text)


def _verify(arguments: argparse.Namespace) -> int:
    problems: list[Problem] = []
    opened: Opened | None = None
    nbytes, damage = 0, None
    try:
        with _calls.opened(arguments.path, arguments.step, IN_SHELL) as opened:
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
        say(f"{printable(p.key)} in {p.path} {p.what}")
    if damage is not None:
        output.complain(str(damage))
    elif problems and arguments.step is None and path != arguments.path and (advice := health.older(path, IN_SHELL)):
        output.complain(advice)
    elif opened is not None and not (arguments.json or problems):
        what = [*([] if opened.format == own.NAME else [opened.format]), *([] if step is None else [f"step {step}"])]
        say(f"{path}: {', '.join(what)}, {as_size(nbytes)} in {len(opened.files)} file(s), {opened.proof}")
    return 1 if problems or damage else 0
