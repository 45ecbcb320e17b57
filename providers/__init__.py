"""State providers: what each kind of training state is, and how it is taken back."""

from datastates.providers.composite import CompositeProvider
from datastates.providers.dtensor import DTensorProvider
from datastates.providers.flat_layout import FlatLayout, Slice
from datastates.providers.object import PickledObjectProvider
from datastates.providers.replicated import ReplicatedProvider
from datastates.providers.rng import RngProvider
from datastates.providers.shares import Partition
from datastates.providers.state_dict import from_state_dict, from_stateful
from datastates.providers.tensor import GpuTensorProvider, HostTensorProvider
from datastates.providers.zero import ShardedZeroProvider

__all__ = [
    "CompositeProvider",
    "DTensorProvider",
    "FlatLayout",
    "GpuTensorProvider",
    "HostTensorProvider",
    "Partition",
    "PickledObjectProvider",
    "ReplicatedProvider",
    "RngProvider",
    "ShardedZeroProvider",
    "Slice",
    "from_state_dict",
    "from_stateful",
]
