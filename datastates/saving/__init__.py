"""The way down: what providers describe is collected, planned, written and committed."""

from datastates.saving.engine import Engine
from datastates.saving.report import Report
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot

__all__ = ["Engine", "Report", "Saver", "Snapshot"]
