"""Plans of saves and restores: offsets and extents from sizes, reads from wanted ranges. No I/O, no framework."""

from datastates.planning.plans import Chunks, ReadPlan, WritePlan
from datastates.planning.read import plan_ahead, plan_read
from datastates.planning.write import plan_write

__all__ = ["Chunks", "ReadPlan", "WritePlan", "plan_ahead", "plan_read", "plan_write"]
