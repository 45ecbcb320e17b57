"""Takes snapshots: collects the shards of providers, plans the file, writes it and commits it."""

from datastates.saving.engine import Engine
from datastates.saving.report import Report
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot

__all__ = ["Engine", "Report", "Saver", "Snapshot"]
