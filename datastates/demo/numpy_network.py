"""A network that predicts the next character, in NumPy alone."""

from __future__ import annotations

import importlib

import numpy as np
import numpy.typing as npt

from datastates.providers import HostTensorProvider, PickledObjectProvider


def symbols() -> npt.NDArray[np.int64]:
    """The text, each character as a number from 0."""
    topics = importlib.import_module("pydoc_data.topics").topics
    characters = np.array(list("\n".join(topics[name] for name in sorted(topics))))
    return np.unique(characters, return_inverse=True)[1].astype(np.int64)


def draw(text: npt.NDArray[np.int64], rows: int, length: int) -> npt.NDArray[np.int64]:
    """(rows, length) stretches of the text, drawn by NumPy's global random generator."""
    begins = np.random.randint(len(text) - length, size=rows)
    return np.take(text, begins[:, np.newaxis] + np.arange(length))


CONTEXT = 16
BATCH = 64
WIDTH = 32
HIDDEN = 2048


class NumpyNetwork:
    """An embedding and two layers, 1.2 million parameters, trained by Adam."""

    def __init__(self) -> None:
        np.random.seed(0)
        self._text = symbols()
        count = int(self._text.max()) + 1
        shapes = {"token": (count, WIDTH), "up": (CONTEXT * WIDTH, HIDDEN), "down": (HIDDEN, count)}
        self._weights = {
            name: (np.random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
            for name, shape in shapes.items()
        }
        self._means = {name: np.zeros_like(weight) for name, weight in self._weights.items()}
        self._squares = {name: np.zeros_like(weight) for name, weight in self._weights.items()}
        self._updates = {"count": 0}
        self.providers = [
            HostTensorProvider("model", self._weights),
            HostTensorProvider("means", self._means),
            HostTensorProvider("squares", self._squares),
            PickledObjectProvider("updates", lambda: self._updates, self._updates.update),
        ]

    def step(self) -> float:
        """Learn from one batch; returns its loss."""
        rows = draw(self._text, BATCH, CONTEXT + 1)
        inputs, targets = rows[:, :-1], rows[:, -1]
        weights = self._weights
        embedded = weights["token"][inputs].reshape(BATCH, -1)
        hidden = np.tanh(embedded @ weights["up"])
        scores = hidden @ weights["down"]
        scores -= scores.max(axis=1, keepdims=True)
        logarithms = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        error = np.exp(logarithms)
        error[np.arange(BATCH), targets] -= 1
        error /= BATCH
        back = (error @ weights["down"].T) * (1 - hidden**2)
        token = np.zeros_like(weights["token"])
        np.add.at(token, inputs, (back @ weights["up"].T).reshape(BATCH, CONTEXT, WIDTH))
        self._update({"token": token, "up": embedded.T @ back, "down": hidden.T @ error})
        return float(-logarithms[np.arange(BATCH), targets].mean())

    def _update(self, gradients: dict[str, npt.NDArray[np.float32]]) -> None:
        """One step of Adam, in place."""
        self._updates["count"] += 1
        for name, gradient in gradients.items():
            mean, square = self._means[name], self._squares[name]
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            rate = 1e-3 * np.sqrt(1 - 0.999 ** self._updates["count"]) / (1 - 0.9 ** self._updates["count"])
            self._weights[name] -= np.float32(rate) * mean / (np.sqrt(square) + np.float32(1e-8))
