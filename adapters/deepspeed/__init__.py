"""DeepSpeed: saves lazy checkpoints in DeepSpeed's own files, and loads them on another number of ranks."""

from datastates.adapters.deepspeed.checkpoint_engine import CheckpointEngine
from datastates.adapters.deepspeed.elastic.load import load_checkpoint
from datastates.adapters.deepspeed.save import Save
from datastates.adapters.deepspeed.settings import DeepSpeedSettings

__all__ = ["CheckpointEngine", "DeepSpeedSettings", "Save", "load_checkpoint"]
