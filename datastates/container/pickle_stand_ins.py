"""Reads pickles that others wrote, with classes of the caller's in the place of named ones.

Like a survey of :mod:`datastates.container.pickle_reader` it runs no code of the classes that the pickle names, and
leaves objects of those without a stand-in unbuilt.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from datastates.container.pickle_reader import _no_arrays, _read, _Surveyor


class _Reader(_Surveyor):
    def __init__(self, data: bytes, classes: Mapping[str, type], constant: Callable[[str], str | None]) -> None:
        super().__init__(data, _no_arrays, "all", with_torch=False)
        self._classes = classes
        self._constant = constant

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._classes:
            return self._own(self._classes[full])
        constant = self._constant(full)
        return super().find_class(module, name) if constant is None else constant

    def load_global(self) -> None:  # as pickle's: no shortcut for arrays, which looks ahead in the stream
        module, name = self.readline()[:-1].decode(), self.readline()[:-1].decode()
        self.append(self.find_class(module, name))

    dispatch = {**_Surveyor.dispatch, pickle.GLOBAL[0]: load_global}  # noqa: RUF012 - as the base class's


def read(data: bytes, classes: Mapping[str, type], constant: Callable[[str], str | None]) -> Any:
    """Read a pickle.

    Args:
        data: A whole pickle stream.
        classes: A class by the name of each class or function, as ``module.qualname``, that it stands for. The pickle
            may call it and set its objects' state in any way: it must be made for that.
        constant: Given the name of anything else, returns a text that stands for it; None where none does.

    Raises:
        FormatError: It cannot be read.
    """
    return _read(_Reader(data, classes, constant))
