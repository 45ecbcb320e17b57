"""State providers: each describes one kind of training state, and takes it back at a restore."""

from datastates.providers.arrays import DTensorProvider, GpuTensorProvider, HostTensorProvider
from datastates.providers.nested.state_dict import from_state_dict
from datastates.providers.objects import PickledObjectProvider, RngProvider
from datastates.providers.optimizer.shares import Partition
from datastates.providers.optimizer.zero import ShardedZeroProvider
from datastates.providers.pytree import PytreeProvider, from_pytree
from datastates.providers.stateful import from_stateful
from datastates.providers.wrap.composite import CompositeProvider
from datastates.providers.wrap.replicated import ReplicatedProvider
from datastates.state.flat_layout import FlatLayout, Slice

__all__ = [
    "CompositeProvider",
    "DTensorProvider",
    "FlatLayout",
    "GpuTensorProvider",
    "HostTensorProvider",
    "Partition",
    "PickledObjectProvider",
    "PytreeProvider",
    "ReplicatedProvider",
    "RngProvider",
    "ShardedZeroProvider",
    "Slice",
    "from_pytree",
    "from_state_dict",
    "from_stateful",
]
