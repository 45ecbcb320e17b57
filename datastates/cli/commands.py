"""The command line: ``datastates ls`` and so on. Only ``export``, and ``diff --values``, import a framework."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from datastates.cli import advise, diff, doctor, drain, export, fetch, inspect, ls, output, timeline, verify
from datastates.cli.arguments import as_location
from datastates.cli.output import OutputError, WrongCallError, say
from datastates.errors import CheckpointNotFoundError, DatastatesError

_SHELLS = ("bash", "zsh", "tcsh")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option to the parser of all commands."""
    text = "print what completes this command in a shell, and exit"
    parser.add_argument("--print-completion", choices=_SHELLS, action=_Print, help=text)


class _Print(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, space: object, shell: Any, option: str | None = None) -> None:
        """Print and exit; raises WrongCallError without shtab."""
        try:
            import shtab
        except ImportError:
            raise WrongCallError("--print-completion needs shtab: pip install 'datastates[cli]'") from None
        for action in _actions(parser):
            if action.type is as_location:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab looks for it
        say(shtab.complete(parser, shell))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The actions of a parser, and of the parsers of its commands."""
    own = list(parser._actions)
    commands = [one for action in own if isinstance(action.choices, dict) for one in action.choices.values()]
    return own + [action for one in commands for action in _actions(one)]


STATUS = "exit status: 0 all is well; 1 something is damaged, differs or failed; 2 a wrong call, or nothing to look at"


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
    finally:
        output.finish()


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
        return 2 if arguments.run is diff.run else 1


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
    parser = _Parser(prog="datastates", description="Look at checkpoints, and bring them elsewhere.", epilog=STATUS)
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('datastates')}")
    add_argument(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (ls, inspect, verify, diff, export, drain, fetch, timeline, advise, doctor):
        name = module.__name__.rpartition(".")[2]
        what: str = module.WHAT
        description = f"{what[0].upper()}{what[1:]}."
        command = commands.add_parser(name, help=what, description=description, epilog=STATUS)
        command.add_argument("--json", action="store_true", help="print JSON for programs")
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser
