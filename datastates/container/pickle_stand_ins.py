"""Reads other tools' pickles, with the caller's classes in the place of named classes.

Like a survey of :mod:`datastates.container.pickle_reader`, it runs no code of the classes that the pickle names, and
leaves objects of classes without a stand-in unbuilt.
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
        classes: Stand-in classes, each by the name of a class or function in the pickle, as ``module.qualname``. The
            pickle may call them and set their objects' state in any way: they must be made for that.
        constant: Given any other name, returns a text in its place, or None to read it as a survey does.

    Raises:
        FormatError: It cannot be read.
    """
    return _read(_Reader(data, classes, constant))
