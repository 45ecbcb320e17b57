"""Agreement between processes without collectives. Independent of checkpoints."""

from datastates.ranks.together import meet, settle
from datastates.ranks.world import SoloWorld, World, world_of

__all__ = ["SoloWorld", "World", "meet", "settle", "world_of"]
