"""The state of a round, whose structure and contents are pure functions of seeds, and the changes made to it."""

from __future__ import annotations

import mmap
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from random_states import arrays_in, random_tree

from datastates.providers import HostTensorProvider, PickledObjectProvider, from_state_dict, from_stateful
from datastates.state.provider import StateProvider

TORCH_TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
NUMPY_TYPES = ["f8", "f4", "f2", "i8", "i1", "u2", "?", "c16"]
LARGE = 400_000
"""Elements of a large array. With a few such arrays, a snapshot is written while it is captured."""


@dataclass(eq=False)
class Memory:
    """One piece of memory, and the arrays of the state that are views of it."""

    name: str
    whole: Any
    """All of the memory, as a one-dimensional array."""
    file: Any = None
    """The file that the memory maps, if any."""
    holders: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    @property
    def frozen(self) -> int:
        """Saves for which its contents stay."""
        return (1, 2, 100)[zlib.crc32(self.name.encode()) % 3]

    @property
    def of_torch(self) -> bool:
        return isinstance(self.whole, torch.Tensor)

    def map(self) -> None:
        """Replace the memory by a mapping of a file."""
        self.file = os.fdopen(os.memfd_create(self.name), "r+b")
        self.file.truncate(self.whole.nbytes)
        self.whole = np.frombuffer(mmap.mmap(self.file.fileno(), self.whole.nbytes), self.whole.dtype)

    def fill(self, seed: int) -> None:
        """Overwrite all of it. A tensor's version counter shows the change."""
        boolean = self.whole.dtype in (torch.bool, np.dtype("?"))
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        data = rng.integers(0, 2 if boolean else 256, self.whole.nbytes, np.uint8)
        if self.of_torch:
            self.whole.view(torch.uint8).copy_(torch.from_numpy(data))
        else:
            self.whole.view(np.uint8)[:] = data

    def flip(self) -> None:
        """Change every byte of it. A tensor's version counter does not show the change."""
        if self.of_torch:
            # not through NumPy, after which it could no longer be resized
            self.whole.data.view(torch.uint8).bitwise_xor_(1)
        else:
            self.whole.view(np.uint8)[:] ^= 1


class State:
    """Arrays, a model with its optimizer, and objects. ``structure`` determines which, ``fill`` their contents."""

    def __init__(self, structure: int) -> None:
        rng = random.Random(structure)
        self.memories: list[Memory] = []
        self.lazy: dict[str, Any] = {}
        self.tree: dict[str, Any] = {"torch": {}, "numpy": {}, "plain": None}
        self.object: dict[str, Any] = {}
        for _ in range(rng.randint(0, 5)):
            self._add(rng, self.lazy, rng.random() < 0.7)
        for _ in range(rng.randint(0, 4)):
            self._add(rng, self.tree["torch"], True)
        self.eager: list[Memory] = []
        for _ in range(rng.randint(0, 2)):
            self._add(rng, self.tree["numpy"], False)
            self.eager.append(self.memories.pop())
        self.steady = rng.choice([1, 100])  # saves for which the object's arrays stay
        self.model: Any = None
        if rng.random() < 0.4:
            width = rng.choice([3, 40, 400])
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()  # creates the optimizer's state
        self.providers: list[StateProvider] = [
            HostTensorProvider("lazy", self.lazy, lazy=True),
            from_state_dict("tree", self.tree),
            PickledObjectProvider("object", get=lambda: self.object, set=self._take),
        ]
        if self.model is not None:
            self.providers += [from_stateful("model", self.model), from_stateful("optimizer", self.optimizer)]

    def _take(self, value: dict[str, Any]) -> None:
        self.object = value

    def _add(self, rng: random.Random, home: dict[str, Any], of_torch: bool) -> None:
        shape = [rng.choice([0, 1, 2, 3, 7, 30]) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.3:
            shape = [rng.randint(LARGE // 4, LARGE)]
        count = int(np.prod(shape, dtype=np.int64))
        name = f"m{len(self.memories)}"
        memory = Memory(name, np.zeros(count, rng.choice(NUMPY_TYPES)))
        if of_torch:
            memory.whole = torch.zeros(count, dtype=rng.choice(TORCH_TYPES))
        elif memory.whole.nbytes and rng.random() < 0.5:
            memory.map()
        whole = memory.whole
        views = [whole.reshape(shape)]
        if rng.random() < 0.2:
            views.append(whole[count // 3 :])
        if len(shape) >= 2 and rng.random() < 0.3:
            views[0] = views[0].T if len(shape) == 2 else views[0][:, ::2]
        for i, view in enumerate(views):
            home[f"{name}.{i}"] = view
            memory.holders.append((home, f"{name}.{i}"))
        self.memories.append(memory)

    def fill(self, number: int) -> None:
        """Give it the contents of save ``number``. The caller holds the gate."""
        rng = random.Random(number)
        for memory in [*self.memories, *self.eager]:
            memory.fill(number - number % memory.frozen)
        self.tree["plain"] = {"seen": rng.getrandbits(70), "loss": rng.random(), "name": f"save {number}"}
        self.object = {"number": number, "tree": random_tree(random.Random(number - number % self.steady))}
        if self.model is not None:
            generator = torch.Generator().manual_seed(number)
            held = [*self.model.parameters(), *(s[k] for s in self.optimizer.state.values() for k in s)]
            held += [b for b in self.model.buffers() if b.is_floating_point()]
            with torch.no_grad():
                for tensor in held:
                    tensor.copy_(torch.rand(tensor.shape, generator=generator))

    def contents(self) -> dict[str, Any]:
        """What loading a snapshot of it gives."""
        found = {"lazy": self.lazy, "tree": self.tree, "object": self.object}
        if self.model is not None:
            found["model"] = self.model.state_dict()
            found["optimizer"] = self.optimizer.state_dict()
        return found

    def touch_eager(self) -> None:
        """Change everything that a snapshot has copied when its call returns."""
        for memory in self.eager:
            memory.flip()
        self.tree["plain"]["seen"] = 0
        for array in arrays_in(self.object):
            if array.size and array.flags.writeable:
                array[...] = np.zeros_like(array)
        self.object["number"] = -1
        if self.model is not None:
            for buffer in self.model.buffers():
                buffer.zero_()


# --- changes to lazily captured memory before its capture; after each, the state is thrown away


def _copied_over(memory: Memory, rng: random.Random) -> None:
    memory.fill(rng.randrange(1 << 30))


def _one_element(memory: Memory, rng: random.Random) -> None:
    if len(memory.whole):
        memory.whole[rng.randrange(len(memory.whole))] = 1


def _past_the_counter(memory: Memory, _: random.Random) -> None:
    memory.flip()


def _emptied(memory: Memory, _: random.Random) -> None:
    memory.whole.untyped_storage().resize_(0)


def _resized(memory: Memory, rng: random.Random) -> None:
    home, key = rng.choice(memory.holders)
    home[key].data.resize_(2 * memory.whole.numel() + 1)


def _storage_grown(memory: Memory, _: random.Random) -> None:
    storage = memory.whole.untyped_storage()
    storage.resize_(2 * storage.nbytes() + 64)


def _shared(memory: Memory, rng: random.Random) -> None:
    home, key = rng.choice(memory.holders)
    home[key].share_memory_()


def _data_replaced(memory: Memory, rng: random.Random) -> None:
    home, key = rng.choice(memory.holders)
    home[key].data = torch.zeros_like(home[key])
    _dropped(memory, rng)


def _set_elsewhere(memory: Memory, rng: random.Random) -> None:
    home, key = rng.choice(memory.holders)
    home[key].set_(torch.zeros_like(home[key]))
    _dropped(memory, rng)


def _dropped(memory: Memory, _: random.Random) -> None:
    """Drop all of the state's references to the memory."""
    for home, key in memory.holders:
        del home[key]
    memory.whole = None


def _reallocated(memory: Memory, _: random.Random) -> None:
    memory.whole.resize(2 * memory.whole.size + 64, refcheck=False)


def _truncated(memory: Memory, _: random.Random) -> None:
    memory.file.truncate(0)


Change = Callable[[Memory, random.Random], None]
OF_ANY: dict[str, Change] = {
    "copied_over": _copied_over,
    "past_the_counter": _past_the_counter,
    "dropped": _dropped,
}
OF_TORCH: dict[str, Change] = {
    "one_element": _one_element,  # NumPy's arrays have no version counter that would show it
    "emptied": _emptied,
    "resized": _resized,
    "storage_grown": _storage_grown,
    "shared": _shared,
    "data_replaced": _data_replaced,
    "set_elsewhere": _set_elsewhere,
}
OF_NUMPY: dict[str, Change] = {"reallocated": _reallocated}
OF_FILES: dict[str, Change] = {"truncated": _truncated}
CHANGES = {**OF_ANY, **OF_TORCH, **OF_NUMPY, **OF_FILES}


def _is_possible(name: str, memory: Memory) -> bool:
    own = OF_TORCH if memory.of_torch else OF_FILES if memory.file else OF_NUMPY
    return name in OF_ANY or name in own


def change(state: State, name: str, seed: int) -> set[str]:
    """Make a change to some of the state's memories; returns the full keys of the arrays in them."""
    rng = random.Random(seed)
    possible = [memory for memory in state.memories if _is_possible(name, memory)]
    keys: set[str] = set()
    for memory in rng.sample(possible, min(len(possible), rng.randint(1, 3))):
        keys |= {("lazy/" if home is state.lazy else "tree/torch/") + key for home, key in memory.holders}
        CHANGES[name](memory, rng)
    return keys
