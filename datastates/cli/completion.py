"""The option ``--print-completion``: a shell's completion of commands, options and paths, made by shtab."""

from __future__ import annotations

import argparse
from typing import Any

from datastates.cli.arguments import as_location
from datastates.cli.output import WrongCallError, say

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
