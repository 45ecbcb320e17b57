"""The command ``datastates``: ls, inspect, verify, diff and export. Only ``export`` imports a framework."""

from datastates.cli.commands import main

__all__ = ["main"]
