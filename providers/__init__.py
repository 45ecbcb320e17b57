"""State providers: what each kind of training state is, and how it is taken back."""

from datastates.providers.composite import CompositeProvider
from datastates.providers.object import PickledObjectProvider
from datastates.providers.rng import RngProvider
from datastates.providers.state_dict import from_state_dict, from_stateful
from datastates.providers.tensor import GpuTensorProvider, HostTensorProvider

__all__ = [
    "CompositeProvider",
    "GpuTensorProvider",
    "HostTensorProvider",
    "PickledObjectProvider",
    "RngProvider",
    "from_state_dict",
    "from_stateful",
]
