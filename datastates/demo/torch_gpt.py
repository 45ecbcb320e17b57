"""A GPT that predicts the next character, in torch."""

from __future__ import annotations

import os

import numpy as np

from datastates.demo.numpy_network import draw, symbols
from datastates.providers import from_stateful

CONTEXT = 64
BATCH = 4


class TorchGpt:
    """Four transformer blocks, 3.2 million parameters, trained by AdamW; on a GPU where there is one."""

    def __init__(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA: deterministic matrix products
        import torch
        from torch import nn

        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cuda.enable_flash_sdp(enabled=False)  # on a GPU, attention by a kernel that is deterministic
        torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
        torch.manual_seed(0)
        np.random.seed(0)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._text = symbols()
        count, width = int(self._text.max()) + 1, 256
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self._model = nn.ModuleDict(
            {
                "token": nn.Embedding(count, width),
                "position": nn.Embedding(CONTEXT, width),
                "blocks": nn.TransformerEncoder(block, 4, enable_nested_tensor=False),
                "norm": nn.LayerNorm(width),
                "head": nn.Linear(width, count),
            }
        ).to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self.providers = [from_stateful("model", self._model), from_stateful("optimizer", self._optimizer)]

    def step(self) -> float:
        """Learn from one batch; returns its loss."""
        import torch
        from torch import nn
        from torch.nn import functional

        rows = torch.from_numpy(draw(self._text, BATCH, CONTEXT + 1)).to(self._device)
        places = torch.arange(CONTEXT, device=self._device)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=self._device)
        x = self._model["token"](rows[:, :-1]) + self._model["position"](places)
        x = self._model["head"](self._model["norm"](self._model["blocks"](x, mask=mask, is_causal=True)))
        loss = functional.cross_entropy(x.flatten(0, 1), rows[:, 1:].flatten())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()  # waits until the last snapshot is captured, and only for that
        return float(loss.item())
