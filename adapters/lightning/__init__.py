"""Lightning: a ``CheckpointIO`` for strategies that save by rank 0, and ``attach`` for ``ModelParallelStrategy``."""

from datastates.adapters.lightning.checkpoint_io import DataStatesCheckpointIO
from datastates.adapters.lightning.strategy import StrategyCheckpoints, attach

__all__ = ["DataStatesCheckpointIO", "StrategyCheckpoints", "attach"]
