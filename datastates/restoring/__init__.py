"""Restores: all ranks choose a checkpoint, compare it with the live state, and take it back together or not at all."""

from datastates.restoring.meeting import Meeting
from datastates.restoring.request import RestoreRequest
from datastates.restoring.restore import Restore
from datastates.restoring.restored import Restored

__all__ = ["Meeting", "Restore", "RestoreRequest", "Restored"]
