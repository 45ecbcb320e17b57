"""The command ``datastates`` with its subcommands ls, inspect, verify and diff. Imports no framework."""

from datastates.cli.commands import main

__all__ = ["main"]
