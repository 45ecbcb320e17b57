"""Tells, when a pickle is written, which names in it a reader refuses without trust."""

from __future__ import annotations

from collections.abc import Collection

from datastates.container import own_classes, pickle_policy, pickle_torch
from datastates.container.pickle_reader import _CLASSES, _VALUES
from datastates.container.pickle_tensors import REBUILDS


def needs_trust(names: Collection[str]) -> list[str]:
    """The names, as ``module.qualname``, that a reader in a process like this one refuses without ``trust``."""
    known = {*pickle_policy.SAFE, *pickle_torch.BUILT_LATE, *pickle_torch.declared(), *REBUILDS, *_CLASSES}
    others = (n for n in names if n not in known and n.removeprefix("torch.") not in _VALUES)
    return sorted(name for name in others if own_classes.find(*name.rpartition(".")[::2]) is None)
