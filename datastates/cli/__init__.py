"""The command ``datastates``: ls, inspect, verify and diff. Imports no framework."""

from datastates.cli.commands import main

__all__ = ["main"]
