"""What each class of ``torch.nn`` is made of and called with, so that it can be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from trained import Inputs, floats, ints

FLAT, SERIES, IMAGE, VOLUME = (3, 4), (2, 4, 8), (2, 4, 6, 6), (2, 4, 4, 4, 4)
BY_RANK = {1: SERIES, 2: IMAGE, 3: VOLUME}


@dataclass(frozen=True)
class Entry:
    """How one class is made, and what it is called with."""

    inputs: Inputs
    make: Callable[[type[nn.Module]], nn.Module]

    def module(self, name: str) -> nn.Module:
        """A new module."""
        return self.make(getattr(nn, name))


def on(inputs: tuple[int, ...] | Inputs, *args: Any, **kwargs: Any) -> Entry:
    """An entry for a class that takes these arguments, and is called with normal numbers of a shape or with inputs."""
    given = [floats(*inputs)] if all(isinstance(size, int) for size in inputs) else list(inputs)  # type: ignore[arg-type]
    return Entry(given, lambda kind: kind(*args, **kwargs))


def by_rank(name: str, *args: Any, ranks: tuple[int, ...] = (1, 2, 3), **kwargs: Any) -> dict[str, Entry]:
    """Entries for the classes of a name that ends in 1d, 2d and 3d."""
    return {f"{name}{rank}d": on(BY_RANK[rank], *args, **kwargs) for rank in ranks}


def probabilities(*shape: int) -> Callable[[], torch.Tensor]:
    """Makes numbers between 0 and 1."""
    return lambda: torch.rand(shape)


def signs(*shape: int) -> Callable[[], torch.Tensor]:
    """Makes numbers that are -1 or 1."""
    return lambda: torch.randint(0, 2, shape) * 2.0 - 1


ELEMENTWISE = (
    *("CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish"),
    *("RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink"),
    *("PReLU", "Dropout", "AlphaDropout", "FeatureAlphaDropout", "Identity", "Flatten"),
)

LOSSES = {
    **{name: on([floats(3, 4), floats(3, 4)]) for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss")},
    "BCELoss": on([probabilities(3, 4), probabilities(3, 4)]),
    "BCEWithLogitsLoss": on([floats(3, 4), probabilities(3, 4)], weight=torch.rand(4), pos_weight=torch.rand(4)),
    "CTCLoss": on([lambda: torch.randn(9, 2, 5).log_softmax(2), ints(4, 2, 3), lambda: [9, 9], lambda: [3, 3]]),
    "CosineEmbeddingLoss": on([floats(3, 4), floats(3, 4), signs(3)]),
    "CrossEntropyLoss": on([floats(3, 4), ints(4, 3)], weight=torch.rand(4)),
    "GaussianNLLLoss": on([floats(3, 4), floats(3, 4), probabilities(3, 4)]),
    "HingeEmbeddingLoss": on([floats(3, 4), signs(3, 4)]),
    "KLDivLoss": on([floats(3, 4), probabilities(3, 4)]),
    "LinearCrossEntropyLoss": on([floats(3, 4), ints(5, 3)], 4, 5),
    "MarginRankingLoss": on([floats(3), floats(3), signs(3)]),
    "MultiLabelMarginLoss": on([floats(3, 4), ints(4, 3, 4)]),
    "MultiLabelSoftMarginLoss": on([floats(3, 4), probabilities(3, 4)], weight=torch.rand(4)),
    "MultiMarginLoss": on([floats(3, 4), ints(4, 3)], weight=torch.rand(4)),
    "NLLLoss": on([floats(3, 4), ints(4, 3)], weight=torch.rand(4)),
    "NLLLoss2d": on([floats(2, 4, 3, 3), ints(4, 2, 3, 3)]),
    "PoissonNLLLoss": on([floats(3, 4), probabilities(3, 4)]),
    "SoftMarginLoss": on([floats(3, 4), signs(3, 4)]),
    "TripletMarginLoss": on([floats(3, 4)] * 3),
    "TripletMarginWithDistanceLoss": on([floats(3, 4)] * 3),
    "AdaptiveLogSoftmaxWithLoss": on([floats(3, 8), ints(12, 3)], 8, 12, [4, 8]),
}

SHAPES = {
    **by_rank("AdaptiveAvgPool", 2),
    **by_rank("AdaptiveMaxPool", 2),
    **by_rank("AvgPool", 2),
    **by_rank("MaxPool", 2),
    **by_rank("LPPool", 2, 2),
    **by_rank("FractionalMaxPool", 2, output_size=2, ranks=(2, 3)),
    **by_rank("CircularPad", 1),
    **by_rank("ConstantPad", 1, 0.5),
    **by_rank("ReflectionPad", 1),
    **by_rank("ReplicationPad", 1),
    **by_rank("ZeroPad", 1),
    **by_rank("Dropout"),
    "MaxUnpool1d": on([floats(2, 4, 4), ints(8, 2, 4, 4)], 2),
    "MaxUnpool2d": on([floats(2, 4, 3, 3), ints(36, 2, 4, 3, 3)], 2),
    "MaxUnpool3d": on([floats(2, 4, 2, 2, 2), ints(64, 2, 4, 2, 2, 2)], 2),
    "ChannelShuffle": on(IMAGE, 2),
    "PixelShuffle": on(IMAGE, 2),
    "PixelUnshuffle": on(IMAGE, 2),
    "Fold": on((2, 8, 9), (4, 4), 2),
    "Unfold": on(IMAGE, 2),
    "Unflatten": on(FLAT, 1, (2, 2)),
    "Upsample": on(IMAGE, scale_factor=2),
    "UpsamplingBilinear2d": on(IMAGE, scale_factor=2),
    "UpsamplingNearest2d": on(IMAGE, scale_factor=2),
    "Softmax2d": on(IMAGE),
    "GLU": on(FLAT),
    "LogSoftmax": on(FLAT, 1),
    "Softmax": on(FLAT, 1),
    "Softmin": on(FLAT, 1),
    "Threshold": on(FLAT, 0.1, 0.5),
    "CosineSimilarity": on([floats(3, 4), floats(3, 4)]),
    "PairwiseDistance": on([floats(3, 4), floats(3, 4)]),
}

NORMS = {
    **by_rank("BatchNorm", 4),
    **by_rank("InstanceNorm", 4, affine=True, track_running_stats=True),
    **by_rank("LazyBatchNorm"),
    **by_rank("LazyInstanceNorm", affine=True, track_running_stats=True),
    "SyncBatchNorm": on(IMAGE, 4),
    "CrossMapLRN2d": on(IMAGE, 2),
    "GroupNorm": on(IMAGE, 2, 4),
    "LayerNorm": on(FLAT, 4),
    "LocalResponseNorm": on(IMAGE, 2),
    "RMSNorm": on(FLAT, 4),
}

LAYERS = {
    **by_rank("Conv", 4, 2, 2),
    **by_rank("ConvTranspose", 4, 2, 2),
    **by_rank("LazyConv", 2, 2),
    **by_rank("LazyConvTranspose", 2, 2),
    "Linear": on(FLAT, 4, 3),
    "LazyLinear": on(FLAT, 3),
    "Bilinear": on([floats(3, 4), floats(3, 2)], 4, 2, 3),
    "Embedding": on([ints(9, 3, 4)], 9, 4, padding_idx=0, scale_grad_by_freq=True),
    "EmbeddingBag": on([ints(9, 3, 4)], 9, 4, mode="mean"),
    "RNN": on(SERIES, 8, 4, num_layers=2, batch_first=True),
    "LSTM": on(SERIES, 8, 4, num_layers=2, bidirectional=True, proj_size=2, batch_first=True),
    "GRU": on(SERIES, 8, 4, num_layers=2, dropout=0.1, batch_first=True),
    "RNNCell": on(FLAT, 4, 3),
    "LSTMCell": on(FLAT, 4, 3),
    "GRUCell": on(FLAT, 4, 3),
    "MultiheadAttention": on([floats(2, 3, 8)] * 3, 8, 2, add_bias_kv=True),
    "TransformerEncoderLayer": on((2, 3, 8), 8, 2, 16),
    "TransformerDecoderLayer": on([floats(2, 3, 8)] * 2, 8, 2, 16),
    "TransformerEncoder": Entry([floats(2, 3, 8)], lambda kind: kind(nn.TransformerEncoderLayer(8, 2, 16), 2)),
    "TransformerDecoder": Entry([floats(2, 3, 8)] * 2, lambda kind: kind(nn.TransformerDecoderLayer(8, 2, 16), 2)),
    "Transformer": on([floats(2, 3, 8)] * 2, 8, 2, 1, 1, 16),
}


class Through(nn.Module):
    """Calls the modules or parameters in a container one after the other."""

    def __init__(self, container: nn.Module) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        items: Any = self.container
        for item in items.values() if hasattr(items, "values") else items:
            x = item(x) if isinstance(item, nn.Module) else x * item
        return x


def _layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(4, 4), "second": nn.BatchNorm1d(4)}


def _parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(4)) for name in ("b", "a")}


CONTAINERS = {
    "Sequential": Entry([floats(*FLAT)], lambda kind: kind(*_layers().values())),
    "ModuleList": Entry([floats(*FLAT)], lambda kind: Through(kind(_layers().values()))),
    "ModuleDict": Entry([floats(*FLAT)], lambda kind: Through(kind(_layers()))),
    "ParameterList": Entry([floats(*FLAT)], lambda kind: Through(kind(_parameters().values()))),
    "ParameterDict": Entry([floats(*FLAT)], lambda kind: Through(kind(_parameters()))),
    "DataParallel": Entry([floats(*FLAT)], lambda kind: kind(nn.Linear(4, 4))),
}

ENTRIES: dict[str, Entry] = {
    **{name: on(FLAT) for name in ELEMENTWISE},
    **LOSSES,
    **SHAPES,
    **NORMS,
    **LAYERS,
    **CONTAINERS,
}
"""By the name of the class."""

ABSTRACT = {"Container", "Module", "RNNBase", "RNNCellBase"}
"""Classes that cannot be called."""
