"""Functions that stand in for those of a library while it saves a checkpoint. The library decides all else."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Function = Callable[..., Any]
Write = Callable[[Mapping[str, torch.Tensor], Path, Mapping[str, str]], None]
"""Writes tensors, by name, to a safetensors file with that metadata."""


@contextlib.contextmanager
def having(holder: Any, name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of an object has another value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def standing_in(module: ModuleType, name: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """A context in which another function is called for one of a module, by this thread.

    Args:
        module: The module in which the function is looked up.
        name: Its name there.
        make: Given the function, returns the one to call instead.
    """
    thread, stock = threading.get_ident(), getattr(module, name)
    instead = make(stock)

    @functools.wraps(stock)
    def call(*words: Any, **options: Any) -> Any:
        return (instead if threading.get_ident() == thread else stock)(*words, **options)

    with having(module, name, call):
        yield


@contextlib.contextmanager
def writing_tensors(functions: Mapping[str, ModuleType], folder: Path, write: Write) -> Iterator[None]:
    """A context in which ``write`` stands in for safetensors' ``save_file``, for files below a folder.

    Args:
        functions: The names that libraries call ``save_file`` by, each with the module that it is looked up in.
        folder: The folder.
        write: Writes a file of it.
    """

    def make(stock: Function) -> Function:
        def save(
            tensors: dict[str, torch.Tensor],
            filename: str | os.PathLike[str],
            metadata: dict[str, str] | None = None,
        ) -> None:
            if Path(filename).is_relative_to(folder):
                write(tensors, Path(filename), metadata or {})
            else:
                stock(tensors, filename, metadata)

        return save

    with contextlib.ExitStack() as stack:
        for name, module in functions.items():
            stack.enter_context(standing_in(module, name, make))
        yield
