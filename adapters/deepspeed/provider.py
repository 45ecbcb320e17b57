"""One file of a DeepSpeed checkpoint: its state dict as a provider, and which of its tensors are lazy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from datastates.providers.nested.tree import TreeProvider
from datastates.state.provider import Saved

# keys of DeepSpeed's parameters and optimizer states; everything else in such a file is small or the client's
_STATE = ("module", "optimizer", "optimizer_state_dict", "frozen_param_fragments")


def buffer_storages(module: Any) -> frozenset[int]:
    """Addresses of the storages of a module's buffers, which the forward pass may change."""
    found = (buffer.untyped_storage().data_ptr() for buffer in module.buffers())
    return frozenset(address for address in found if address)


class StateFileProvider(TreeProvider):
    """The state dict of one file, for saving only: DeepSpeed itself restores it.

    Parameters and optimizer states are lazy, as only an optimizer step changes them. Everything else is copied at once:
    buffers, tensors in the optimizer's parameter groups, and what the client added. Files without DeepSpeed's usual
    keys (a pipeline's layers, experts) hold only parameters and buffers.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._state: dict[Any, Any] = {}
        self._buffers: frozenset[int] = frozenset()
        self._has_sections = False

    def hold(self, state: dict[Any, Any], buffers: frozenset[int]) -> None:
        """Take the next checkpoint's state dict, and the addresses of storages that the forward pass may change."""
        self._state, self._buffers = state, buffers
        self._has_sections = any(section in state for section in _STATE)

    def let_go(self) -> None:
        """Forget the state dict."""
        self._state = {}

    def value(self) -> object:
        """The state dict."""
        return self._state

    def is_lazy(self, key: str, array: object) -> bool:
        """Whether only an optimizer step changes an array."""
        if not isinstance(array, torch.Tensor):
            return False
        path = key.split("/")
        if (self._has_sections and path[0] not in _STATE) or "param_groups" in path:
            return False
        return array.untyped_storage().data_ptr() not in self._buffers

    def match(self, stored: object, saved: Saved) -> Sequence[tuple[str, object]]:
        """Raise NotImplementedError: DeepSpeed restores its files."""
        self._refuse()

    def accept(self, value: Any) -> None:
        """Raise NotImplementedError: DeepSpeed restores its files."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self.name!r}: load_checkpoint() restores the files of DeepSpeed")
