"""Restoring: opens a checkpoint, compares it, and reads it into live state, into new arrays or as a mapping."""

from datastates.restoring.loading import load
from datastates.restoring.meeting import Meeting
from datastates.restoring.one_tensor import Checkpoint
from datastates.restoring.reads import Reads
from datastates.restoring.restore import Restore
from datastates.restoring.restored import Restored
from datastates.restoring.stored import Stored

__all__ = ["Checkpoint", "Meeting", "Reads", "Restore", "Restored", "Stored", "load"]
