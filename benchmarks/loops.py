"""Training loops to checkpoint: a small one for a CPU, and a GPT of about 555 M parameters for a GPU."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gpt import Gpt
from states import State, llm_like

Gate = Callable[[], contextlib.AbstractContextManager[object]]


class Loop(ABC):
    """A model, its optimizer, and the state to checkpoint."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: State

    @abstractmethod
    def backward(self) -> None:
        """Run forward and backward on one batch."""

    def synchronize(self) -> None:  # noqa: B027 - nothing is ever enqueued on a CPU
        """Wait until all enqueued work is done."""

    def iterate(self, gate: Gate = contextlib.nullcontext) -> None:
        """Run one training iteration. The gate is opened after the backward pass, and the update runs within it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.backward()
        with gate():
            self.optimizer.step()


class MarkedLoop(Loop):
    """A loop whose iterations can be timed without waiting for them."""

    @abstractmethod
    def mark(self) -> Any:
        """The moment at which the work enqueued so far is done."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks. Call it only after :meth:`synchronize`."""


class CpuLoop(MarkedLoop):
    """A small network and a large state that does not change, so that a snapshot drains for a while."""

    def __init__(self, *, tiny: bool) -> None:
        width = 64 if tiny else 1024
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(64, width)
        self.state = {"model": self.model, "optimizer": self.optimizer, "frozen": llm_like(tiny=tiny)}
        self.iterate()

    def backward(self) -> None:
        self.model(self._batch).square().mean().backward()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class GpuLoop(MarkedLoop):
    """A GPT with bf16 autocast over fp32 parameters and fused AdamW: 12 bytes per parameter, about 6.6 GB."""

    def __init__(self, *, tiny: bool) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        with torch.device("cuda"):
            self.model = Gpt(width=128, layers=2, heads=2) if tiny else Gpt(width=1280, layers=26, heads=20)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        batch, length = (2, 128) if tiny else (8, 1024)
        self._tokens = torch.randint(Gpt.VOCABULARY, (batch, length + 1), device="cuda")
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.iterate()

    def backward(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(self._tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3
