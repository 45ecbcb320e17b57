"""Modules that ``torch.ao`` quantizes: dynamically, statically, or while they are trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.ao.nn.intrinsic.qat
import torch.ao.nn.qat
import torch.ao.nn.quantizable
import torch.ao.nn.quantized
import torch.ao.nn.quantized.dynamic
from subject import Case, Subject
from torch import nn
from torch.ao import quantization
from trained import floats, ints, training

Q, D = torch.ao.nn.quantized, torch.ao.nn.quantized.dynamic
IMAGE, VOLUME, SERIES = (2, 4, 6, 6), (2, 4, 4, 4, 4), (2, 4, 8)


def quantized(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Makes quantized numbers."""
    return lambda: torch.quantize_per_tensor(make(), 0.1, 128, torch.quint8)


STATIC: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "BatchNorm2d": ((4,), IMAGE),
    "BatchNorm3d": ((4,), VOLUME),
    "Conv1d": ((4, 2, 2), SERIES),
    "Conv2d": ((4, 2, 2), IMAGE),
    "Conv3d": ((4, 2, 2), VOLUME),
    "ConvTranspose1d": ((4, 2, 2), SERIES),
    "ConvTranspose2d": ((4, 2, 2), IMAGE),
    "ConvTranspose3d": ((4, 2, 2), VOLUME),
    "Dropout": ((), (2, 4)),
    "ELU": ((0.1, 128), (2, 4)),
    "Hardswish": ((0.1, 128), (2, 4)),
    "LeakyReLU": ((0.1, 128), (2, 4)),
    "Linear": ((4, 3), (2, 4)),
    "MaxPool2d": ((2,), IMAGE),
    "PReLU": ((0.1, 128), (2, 4)),
    "ReLU6": ((), (2, 4)),
    "Sigmoid": ((0.1, 128), (2, 4)),
    "Softmax": ((1, 0.1, 128), (2, 4)),
}
"""Classes of ``torch.ao.nn.quantized``: their arguments, and the shape that they are called with."""

WITH_PARAMETERS = {
    "GroupNorm": ((2, 4), IMAGE),
    "InstanceNorm1d": ((4,), SERIES),
    "InstanceNorm2d": ((4,), IMAGE),
    "InstanceNorm3d": ((4,), VOLUME),
    "LayerNorm": ((4,), (2, 4)),
}
"""Classes of ``torch.ao.nn.quantized`` that are given a weight and a bias; their other arguments, and the shape."""

ELSEWHERE = {
    "DeQuantize": "in the converted model",
    "Quantize": "in the converted model",
    "Embedding": "by itself",
    "EmbeddingBag": "by itself",
    "FXFloatFunctional": "has no state",
    "FloatFunctional": "is replaced by QFunctional",
    "QFunctional": "by itself",
    "LSTM": "in the converted LSTM",
    "MultiheadAttention": "in the converted attention",
}
"""Classes of ``torch.ao.nn.quantized`` that another case has."""

DYNAMIC: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "Conv1d": ((4, 2, 2), SERIES),
    "Conv2d": ((4, 2, 2), IMAGE),
    "Conv3d": ((4, 2, 2), VOLUME),
    "ConvTranspose1d": ((4, 2, 2), SERIES),
    "ConvTranspose2d": ((4, 2, 2), IMAGE),
    "ConvTranspose3d": ((4, 2, 2), VOLUME),
    "GRU": ((8, 4), SERIES),
    "GRUCell": ((4, 3), (2, 4)),
    "LSTM": ((8, 4, 2), SERIES),
    "LSTMCell": ((4, 3), (2, 4)),
    "Linear": ((4, 3), (2, 4)),
    "RNNCell": ((4, 3), (2, 4)),
}
"""Classes of ``torch.ao.nn.quantized.dynamic``."""

OBSERVERS: dict[str, dict[str, Any]] = {
    "FakeQuantize": {},
    "FixedQParamsFakeQuantize": {
        "observer": quantization.FixedQParamsObserver.with_args(scale=0.1, zero_point=3, quant_min=0, quant_max=255)
    },
    "FusedMovingAvgObsFakeQuantize": {},
    "FixedQParamsObserver": {"scale": 0.1, "zero_point": 3},
    "HistogramObserver": {},
    "MinMaxObserver": {},
    "MovingAverageMinMaxObserver": {},
    "MovingAveragePerChannelMinMaxObserver": {},
    "NoopObserver": {},
    "PerChannelMinMaxObserver": {},
    "PlaceholderObserver": {},
    "RecordingObserver": {},
    "ReuseInputObserver": {},
}
"""Observers and fake quantization of ``torch.ao.quantization``, and their arguments."""

ABSTRACT = {"AffineQuantizedObserverBase", "FakeQuantizeBase", "ObserverBase", "UniformQuantizationObserverBase"}
NO_STATE = {"DeQuantStub", "QuantStub", "QuantWrapper"}
"""Their modules are in the model that is prepared."""


def used(module: nn.Module, make: Callable[[], Any]) -> Subject:
    """A module that is called and not trained."""
    return Subject({"model": module}, lambda: module(make()))


def static(name: str) -> Subject:
    """A class of ``torch.ao.nn.quantized`` with random weights."""
    if name in WITH_PARAMETERS:
        arguments, shape = WITH_PARAMETERS[name]
        own = [nn.Parameter(torch.rand(4)) for _ in range(2)]
        return used(getattr(Q, name)(*arguments, *own, 0.1, 128), quantized(floats(*shape)))
    arguments, shape = STATIC[name]
    return used(randomized(getattr(Q, name)(*arguments)), quantized(floats(*shape)))


def randomized(module: nn.Module) -> nn.Module:
    """Put random numbers into the packed weight of a module, if it has one."""
    if hasattr(module, "set_weight_bias"):
        weight, bias = module._weight_bias()
        new = torch.quantize_per_tensor(torch.randn(weight.shape), float(torch.rand(())) + 0.1, 0, torch.qint8)
        module.set_weight_bias(new, torch.randn_like(bias))
        if hasattr(module, "scale"):
            module.scale, module.zero_point = float(torch.rand(())), int(torch.randint(0, 100, ()))
    return module


def dynamic(name: str) -> Subject:
    """A class of ``torch.ao.nn.quantized.dynamic`` with random weights."""
    arguments, shape = DYNAMIC[name]
    float_class = getattr(nn, name, None)
    if name in ("GRU", "LSTM", "GRUCell", "LSTMCell", "RNNCell"):
        whole = nn.Sequential(float_class(*arguments))
        return used(quantization.quantize_dynamic(whole, {float_class}), floats(*shape))
    return used(randomized(getattr(D, name)(*arguments)), floats(*shape))


def embedding(name: str) -> Subject:
    """An embedding of quantized weights."""
    module = getattr(Q, name)(9, 4)
    scales, zeros = torch.rand(9) + 0.1, torch.randint(0, 9, (9,)).float()
    module.set_weight(torch.quantize_per_channel(torch.randn(9, 4), scales, zeros, 0, torch.quint8))
    if name == "Embedding":
        return used(module, ints(9, 3, 4))
    return Subject({"model": module}, lambda: module(torch.randint(0, 9, (6,)), torch.tensor([0, 3])))


def functional() -> Subject:
    """The scale of an addition."""
    module = Q.QFunctional()
    module.scale, module.zero_point = float(torch.rand(())), int(torch.randint(0, 100, ()))
    make = quantized(floats(2, 4))
    return Subject({"model": module}, lambda: module.add(make(), make()))


def observer(name: str) -> Subject:
    """An observer that has seen some numbers."""
    return used(getattr(quantization, name)(**OBSERVERS[name]), floats(3, 4))


class Net(nn.Module):
    """What is prepared and converted."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4), nn.ReLU()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.conv(self.quant(x)))).mean((2, 3))
        return self.dequant(self.fc(x))


def prepared(backend: str, *, qat: bool) -> Net:
    """A model with observers; with fake quantization where it is trained on."""
    net = Net().train(qat)
    fuse = quantization.fuse_modules_qat if qat else quantization.fuse_modules
    net = fuse(net, [["conv", "norm", "relu"]])
    get = quantization.get_default_qat_qconfig if qat else quantization.get_default_qconfig
    net.qconfig = get(backend)
    return quantization.prepare_qat(net) if qat else quantization.prepare(net)


def aware(backend: str) -> Subject:
    """Training that knows of quantization."""
    return training(prepared(backend, qat=True), [floats(*IMAGE)])


def calibrated(backend: str) -> Subject:
    """A model whose observers look at inputs."""
    return used(prepared(backend, qat=False), floats(*IMAGE))


def converted(backend: str, *, qat: bool) -> Subject:
    """A model that was quantized after it had seen some inputs."""
    net = prepared(backend, qat=qat)
    net(torch.randn(IMAGE))
    return used(quantization.convert(net.eval()), floats(*IMAGE))


def converted_lstm() -> Subject:
    """An LSTM that is quantized statically."""
    net = nn.Sequential(quantization.QuantStub(), nn.LSTM(8, 4)).eval()
    net.qconfig = quantization.get_default_qconfig("fbgemm")
    config = {"float_to_observed_custom_module_class": {nn.LSTM: torch.ao.nn.quantizable.LSTM}}
    net = quantization.prepare(net, prepare_custom_config_dict=config)
    net(torch.randn(SERIES))
    custom = {"observed_to_quantized_custom_module_class": {torch.ao.nn.quantizable.LSTM: Q.LSTM}}
    return used(quantization.convert(net, convert_custom_config_dict=custom), floats(*SERIES))


def cases() -> Iterator[Case]:
    """All of them."""
    yield from (Case(f"static {n}", partial(static, n), gated=False) for n in (*STATIC, *WITH_PARAMETERS))
    yield from (Case(f"dynamic {n}", partial(dynamic, n), gated=False) for n in DYNAMIC)
    yield from (Case(f"static {n}", partial(embedding, n), gated=False) for n in ("Embedding", "EmbeddingBag"))
    yield from (Case(f"observer {n}", partial(observer, n), gated=False) for n in OBSERVERS)
    yield Case("static QFunctional", functional)
    for backend in ("fbgemm", "qnnpack"):
        yield Case(f"aware {backend}", partial(aware, backend))
        yield Case(f"calibrated {backend}", partial(calibrated, backend))
    yield Case("converted", partial(converted, "fbgemm", qat=False))
    yield Case("converted after training", partial(converted, "fbgemm", qat=True))
    yield Case("converted LSTM", converted_lstm)


def classes(module: ModuleType) -> set[str]:
    """The public names of the modules in a package of torch."""
    return {
        name
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and name == kind.__name__ and name[0] != "_"
    } - {"Module"}
