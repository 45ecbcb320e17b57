"""The small files of a checkpoint, which a framework writes by ``torch.save`` itself."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from datastates.adapters.shared.stand_ins import Function, standing_in
from datastates.errors import StorageError, storage_errors

_OF_RUST = re.compile(r"\(os error ([0-9]+)\)$")
"""As the error of safetensors ends, which is no OSError."""


@contextlib.contextmanager
def written(folder: Path, final: Path, failed: list[OSError] | None, *, whole: bool) -> Iterator[None]:
    """A context in which a failure to write into a folder names path and reason, which ``torch.save`` does not.

    Args:
        folder: The folder.
        final: The checkpoint that it is to be, for the message of a system call that names no path.
        failed: Takes failures of storage, and ``torch.save`` returns nevertheless. None: they are raised.
        whole: Whether other ranks wait for what the context does. A failure that would end it is then raised.
    """

    def make(stock: Function) -> Function:
        def save(obj: Any, f: Any, *words: Any, **options: Any) -> None:
            if not isinstance(f, (str, os.PathLike)) or not Path(f).is_relative_to(folder):
                stock(obj, f, *words, **options)
                return
            try:
                _save(stock, obj, Path(f), *words, **options)
            except OSError as error:
                if failed is None:
                    raise
                failed.append(error)

        return save

    with collected(final, None if whole else failed), standing_in(torch, "save", make):
        yield


@contextlib.contextmanager
def collected(final: Path, failed: list[OSError] | None) -> Iterator[None]:
    """A context that ends at a failure of storage. It goes into ``failed``, or is raised if that is None."""
    try:
        yield
    except Exception as error:
        told = _told(error, final)
        if told is None or (failed is None and told is error):
            raise
        if failed is None:
            raise told from error
        failed.append(told)


def _told(error: Exception, final: Path) -> OSError | None:
    """The failure of storage, with a path, that an error tells of; None if it tells of another."""
    if isinstance(error, OSError):
        return error if error.filename is not None else StorageError(error.errno or 0, "write", str(final))
    found = _OF_RUST.search(str(error))
    return None if found is None else StorageError(int(found[1]), "write", str(final))


def _save(stock: Function, obj: Any, path: Path, *words: Any, **options: Any) -> None:
    try:
        stock(obj, path, *words, **options)
    except RuntimeError:  # it says where torch's writer stood, neither which file it is nor what the system said
        content = io.BytesIO()
        stock(obj, content, *words, **options)
        with storage_errors("write", str(path)):
            path.write_bytes(content.getbuffer())
