"""Lets the engine write the safetensors files of a folder that a library of Hugging Face saves a model to.

The library decides all else: which tensors, under which names, in which files, with which index.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Write = Callable[[Mapping[str, torch.Tensor], Path, Mapping[str, str]], None]
"""Writes tensors, by name, to a file with that metadata."""


@contextlib.contextmanager
def redirected(functions: Mapping[str, ModuleType], folder: Path, write: Write) -> Iterator[None]:
    """A context in which ``write`` takes the place of safetensors' ``save_file``, on this thread and below a folder.

    Args:
        functions: The names that libraries call ``save_file`` by, each with the module that it is looked up in.
        folder: The folder.
        write: Writes a file of it.
    """
    thread = threading.get_ident()

    def instead_of(save_file: Callable[..., None]) -> Callable[..., None]:
        def save(
            tensors: dict[str, torch.Tensor],
            filename: str | os.PathLike[str],
            metadata: dict[str, str] | None = None,
            **others: Any,
        ) -> None:
            if threading.get_ident() == thread and Path(filename).is_relative_to(folder) and not others:
                write(tensors, Path(filename), metadata or {})
            else:
                save_file(tensors, filename, metadata, **others)

        return save

    with contextlib.ExitStack() as stack:
        for name, module in functions.items():
            stock = getattr(module, name)
            stack.callback(setattr, module, name, stock)
            setattr(module, name, instead_of(stock))
        yield
