"""What the models of the demonstration learn: the text of Python's own help pages."""

import importlib

import numpy as np
import numpy.typing as npt


def symbols() -> npt.NDArray[np.int64]:
    """The text, each character as a number from 0."""
    topics = importlib.import_module("pydoc_data.topics").topics
    characters = np.array(list("\n".join(topics[name] for name in sorted(topics))))
    return np.unique(characters, return_inverse=True)[1].astype(np.int64)


def draw(text: npt.NDArray[np.int64], rows: int, length: int) -> npt.NDArray[np.int64]:
    """(rows, length) stretches of the text, drawn by NumPy's global random generator."""
    begins = np.random.randint(len(text) - length, size=rows)
    return np.take(text, begins[:, np.newaxis] + np.arange(length))
