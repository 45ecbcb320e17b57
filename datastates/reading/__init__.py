"""Reading: the bytes and tensors of a checkpoint, without providers, into memory that is new or given."""

from datastates.reading.checkpoint import Checkpoint
from datastates.reading.reads import Reads
from datastates.reading.stored import Stored
from datastates.reading.whole_checkpoint import load

__all__ = ["Checkpoint", "Reads", "Stored", "load"]
