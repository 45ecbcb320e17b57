"""Classes of libraries that keep, make or change their state in ways of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from optim_classes import stepped
from subject import Case, Subject
from torch import nn
from trained import Inputs, called, floats, ints, training


def measured(make: Callable[[], nn.Module], inputs: Inputs, *, persistent: bool) -> Subject:
    """A metric that has states, which it saves only if it is told to."""
    metric: Any = make()
    metric.persistent(persistent)

    def train() -> object:
        called(metric.update, inputs)
        return metric.compute()

    return Subject({"metric": metric}, train)


def torchmetrics() -> Iterator[Case]:
    """Metrics with states that are tensors, lists of tensors, and metrics of their own."""
    import torchmetrics as tm

    classes: Inputs = [ints(3, 8), ints(3, 8)]
    chances: Inputs = [lambda: torch.rand(8), ints(2, 8)]
    values: Inputs = [floats(8), floats(8)]
    accuracy = partial(tm.Accuracy, task="multiclass", num_classes=3)
    found: dict[str, tuple[Callable[[], Any], Inputs]] = {
        "MeanMetric": (tm.MeanMetric, [floats(8)]),
        "CatMetric": (tm.CatMetric, [floats(8)]),
        "Accuracy": (accuracy, classes),
        "ConfusionMatrix": (partial(tm.ConfusionMatrix, task="multiclass", num_classes=3), classes),
        "AUROC": (partial(tm.AUROC, task="binary"), chances),
        "AUROC of thresholds": (partial(tm.AUROC, task="binary", thresholds=5), chances),
        "PearsonCorrCoef": (tm.PearsonCorrCoef, values),
        "MeanSquaredError": (tm.MeanSquaredError, values),
        "SpearmanCorrCoef": (tm.SpearmanCorrCoef, values),
        "collection": (
            lambda: tm.MetricCollection({"a": accuracy(), "f": tm.F1Score(task="multiclass", num_classes=3)}),
            classes,
        ),
        "MinMaxMetric": (lambda: tm.MinMaxMetric(accuracy()), classes),
        "BootStrapper": (lambda: tm.BootStrapper(tm.MeanSquaredError(), num_bootstraps=3), values),
        "Running": (lambda: tm.wrappers.Running(tm.MeanMetric(), window=2), [floats(8)]),
        "compositional": (lambda: tm.MeanMetric() + tm.SumMetric(), [floats(8)]),
    }
    for name, (make, inputs) in found.items():
        for persistent in (True, False):
            yield Case(f"{name}{' persistent' * persistent}", partial(measured, make, inputs, persistent=persistent))


def _llama() -> Any:
    from transformers import LlamaForCausalLM
    from transformers_families import FAMILIES

    return LlamaForCausalLM(LlamaForCausalLM.config_class(**FAMILIES["LlamaForCausalLM"].options))


class Adapters:
    """The state of a model's adapters alone, as peft takes and gives it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> Any:
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.model)

    def load_state_dict(self, state: Any) -> Any:
        from peft import set_peft_model_state_dict

        return set_peft_model_state_dict(self.model, state)


def adapted(config: Callable[[], Any], *, alone: bool) -> Subject:
    """A model with adapters, which are trained; or the state of these alone."""
    import peft

    model = peft.get_peft_model(_llama(), config()).train()
    subject = training(model, {"input_ids": ints(32, 2, 6)})
    if alone:
        subject.objects["model"] = Adapters(model)
    return subject


def peft() -> Iterator[Case]:
    """Kinds of adapters."""
    import peft

    linear = {"target_modules": ["q_proj", "v_proj"]}
    configs: dict[str, Callable[[], Any]] = {
        "LoRA": partial(peft.LoraConfig, r=2, **linear),
        "DoRA": partial(peft.LoraConfig, r=2, use_dora=True, **linear),
        "LoRA and whole modules": partial(peft.LoraConfig, r=2, modules_to_save=["lm_head"], **linear),
        "LoHa": partial(peft.LoHaConfig, r=2, **linear),
        "LoKr": partial(peft.LoKrConfig, r=2, **linear),
        "OFT": partial(peft.OFTConfig, r=0, oft_block_size=4, **linear),
        "VeRA": partial(peft.VeraConfig, r=2, target_modules=["q_proj"]),
        "IA3": partial(peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "AdaLoRA": partial(peft.AdaLoraConfig, init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, **linear),
        "prompts": partial(peft.PromptTuningConfig, task_type="CAUSAL_LM", num_virtual_tokens=2),
    }
    for name, config in configs.items():
        for alone in (True, False):
            yield Case(f"{name}{' alone' * alone}", partial(adapted, config, alone=alone))


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def optimized(make: Callable[[Any], Any]) -> Subject:
    """A module and an optimizer of a library."""
    model = _layers()
    return stepped(model, make(model.parameters()), floats(3, 64))


def schedulefree() -> Iterator[Case]:
    """Optimizers that keep the parameters between two points."""
    import schedulefree as sf

    def trained(kind: Any, parameters: Any) -> Any:
        optimizer = kind(parameters, lr=0.05)
        optimizer.train()
        return optimizer

    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        yield Case(name, partial(optimized, partial(trained, getattr(sf, name))))


def bitsandbytes() -> Iterator[Case]:
    """Optimizers with states of 8 bits, and layers with derived weights."""
    import bitsandbytes as bnb

    for name in ("Adam8bit", "AdamW8bit", "Lion8bit", "AdEMAMix8bit", "PagedAdam8bit", "Adam"):
        yield Case(name, partial(optimized, partial(getattr(bnb.optim, name), lr=0.01)))
    yield Case("SGD8bit", partial(optimized, partial(bnb.optim.SGD8bit, lr=0.01, momentum=0.9)))
    yield Case("StableEmbedding", lambda: training(bnb.nn.StableEmbedding(9, 4), [ints(9, 3, 4)]))
    yield Case("Linear8bitLt", lambda: training(bnb.nn.Linear8bitLt(8, 4), [floats(3, 8)]))


def torchao() -> Iterator[Case]:
    """Quantized layers, training that knows of quantization, and optimizers with small states."""
    from torchao import optim, quantization
    from torchao.quantization import qat

    def quantized(config: Any) -> Subject:
        module = _layers().to(torch.bfloat16)
        quantization.quantize_(module, config())
        return Subject({"model": module}, lambda: module(torch.randn(3, 64, dtype=torch.bfloat16)))

    def aware() -> Subject:
        module = _layers()
        weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
        quantization.quantize_(module, qat.QATConfig(weight_config=weights, step="prepare"))
        return training(module, [floats(3, 64)])

    def uncompiled(make: Callable[[Any], Any]) -> Subject:
        subject = optimized(make)
        return Subject(subject.objects, lambda: torch.compiler.set_stance("force_eager")(subject.train)())

    for name in ("Int8WeightOnly", "Float8WeightOnly", "IntxWeightOnly", "Int8DynamicActivationInt8Weight"):
        yield Case(name, partial(quantized, getattr(quantization, f"{name}Config")))
    yield Case("aware", aware)
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        yield Case(name, partial(uncompiled, partial(getattr(optim, name), lr=0.01)))


LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {
    kind.__name__: kind for kind in (torchmetrics, peft, schedulefree, bitsandbytes, torchao)
}
"""By the name of the library, its cases."""
