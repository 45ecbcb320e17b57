"""Reads a ``checkpoint-N`` of transformers' Trainer: weights, and files of ``torch.save`` for optimizer and others."""

from __future__ import annotations

import errno
import fnmatch

from datastates.errors import StorageError
from datastates.formats import hugging_face
from datastates.formats.composite import Composite
from datastates.formats.json_field import read_field
from datastates.formats.torch_file import TorchFile
from datastates.storage import store_of
from datastates.storage.location import Location

NAME = "a checkpoint of a Trainer"
_STATE = "trainer_state.json"
_MOST_STATE = 1 << 30
"""Longest state in bytes that is read: it has a line for each step that was logged."""
_OTHERS = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")
"""Files read beside the weights. ``training_args.bin`` is not: it holds an object of the Trainer's, and no tensor."""


def recognises(path: Location) -> bool:
    """Whether a folder has ``trainer_state.json``, the state of a Trainer."""
    return store_of(path).is_file(path / _STATE)


def open(path: Location) -> Composite:
    """Open a ``checkpoint-N``. Weights keep their names; the keys of any other file begin with the file's stem.

    Raises:
        FormatError: A file is damaged, or cannot be read without running code; the message names it.
        StorageError: A file is missing or cannot be read; the message names it.
    """
    file = path / _STATE
    if not hugging_face.recognises(path):
        what = f"{path} has no weights in the files of one rank: neither model.safetensors nor pytorch_model.bin"
        raise StorageError(errno.ENOENT, "open", str(path), what)
    step = read_field(file, "global_step", "state of a Trainer", most=_MOST_STATE)
    store, names = store_of(path), store_of(path).names(path)
    found = sorted(
        path / name for glob in _OTHERS for name in fnmatch.filter(names, glob) if store.is_file(path / name)
    )
    others = {other.stem: TorchFile(other, other.stem) for other in found}
    return Composite(NAME, path, hugging_face.open(path), others, step if type(step) is int else None)
