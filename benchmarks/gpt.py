"""A GPT: pre-norm transformer blocks, with tied input and output embeddings."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """A GPT. With a width of 1280 and 26 layers it has 555 M parameters."""

    VOCABULARY = 32768
    CONTEXT = 1024

    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(self.VOCABULARY, width), nn.Embedding(self.CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, time) symbols to (batch, time, symbols) logits."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits
