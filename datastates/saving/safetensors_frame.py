"""Safetensors files as a format of files: a header, and behind it the tensors end to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from datastates.commit.ending import Identity
from datastates.container.index import Hashes
from datastates.container.named_tensor import Tensor
from datastates.container.safetensors_header import encode_header, file_order
from datastates.errors import ProviderError
from datastates.executor.executor import PreparedWrite, prepare_write
from datastates.planning import write
from datastates.planning.plans import WritePlan
from datastates.saving.frame import Checksums, Objects, Tail
from datastates.saving.structure import Structure
from datastates.state import keys
from datastates.state.strides import is_row_major


@dataclass(frozen=True, slots=True)
class SafetensorsFraming:
    """Plans safetensors files. See :class:`~datastates.saving.frame.Framing`.

    The state must have one provider, without objects. Each key must be one component: the tensor's name. Each array
    must be whole, lazy, row-major, and alone in its buffer.

    Attributes:
        metadata: The texts by name that the header holds besides the tensors, as ``__metadata__``.
    """

    metadata: Mapping[str, str]

    def plan(self, structure: Structure, block: int) -> tuple[SafetensorsFrame, PreparedWrite]:
        """Plan a file; raises ProviderError for an array that safetensors cannot hold."""
        assert len(structure.names) == 1
        tensors = [_tensor(structure, i) for i in range(len(structure.arrays))]
        order = file_order(tensors)
        owner: dict[int, str] = {}
        for i in order:
            first = owner.setdefault(structure.source[i], tensors[i].key)
            if first != tensors[i].key and tensors[i].nbytes:
                raise ProviderError(f"{first!r} and {tensors[i].key!r} share memory, which safetensors cannot express")
        try:
            header = encode_header([tensors[i] for i in order], self.metadata)
        except ValueError as error:
            raise ProviderError(str(error)) from error
        sizes = np.array([b.nbytes for b in structure.buffers], np.uint64)
        plan = write.plan_dense_write(sizes, list(owner), len(header), block)
        return SafetensorsFrame(plan), prepare_write(plan, header)


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsFrame:
    """The frame of a safetensors file, which is all in its plan. See :class:`~datastates.saving.frame.Frame`."""

    plan: WritePlan

    def encode_objects(self, objects: Objects) -> Callable[[Checksums, Identity, Hashes | None], Tail]:
        """Return a function that gives the empty tail: nothing stands behind the tensors."""
        assert not objects
        return lambda sums, identity, hashes: Tail(b"")


def _tensor(structure: Structure, i: int) -> Tensor:
    _, shard = structure.arrays[i]
    assert shard.dtype is not None
    assert shard.buffer is not None
    tensor = Tensor(structure.key(i), str(keys.parts(shard.key)[0]), shard.dtype, tuple(shard.shape))
    whole = tuple(shard.global_shape) == tensor.shape and is_row_major(shard.shape, shard.stride)
    if not (whole and shard.lazy and shard.buffer.nbytes == tensor.nbytes):
        raise ProviderError(f"{tensor.key!r} is not whole, lazy, and row-major in memory of its own")
    return tensor
