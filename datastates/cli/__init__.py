"""The command ``datastates``. Only its ``export``, and ``diff --values``, import a framework."""

from datastates.cli.commands import main

__all__ = ["main"]
