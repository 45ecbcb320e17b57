"""Reads tensors of a checkpoint, and their bytes, into new memory or into live arrays. Knows no providers."""

from datastates.reading.checkpoint import Checkpoint
from datastates.reading.reads import Reads
from datastates.reading.stored import Stored
from datastates.reading.whole_checkpoint import load

__all__ = ["Checkpoint", "Reads", "Stored", "load"]
