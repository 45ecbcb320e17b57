"""A model's weights in a checkpoint are found, or refused by name before any is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import datastates as ds
from datastates.errors import DatastatesError
from datastates.providers import from_state_dict, from_stateful
from datastates.serving.model_keys import model_keys
from datastates.serving.needed import Needed, needed_by

SHAPES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
K = "model.layers.1.self_attn.k_proj.weight"


def config(**more: Any) -> LlamaConfig:
    return LlamaConfig(**SHAPES, architectures=["LlamaForCausalLM"], **more)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config())


@pytest.fixture(scope="module")
def tied() -> LlamaForCausalLM:
    return LlamaForCausalLM(config(tie_word_embeddings=True))


@pytest.fixture(scope="module")
def needed() -> Needed:
    return needed_by(config())


def found(path: Path, needed: Needed, prefix: str | None = None) -> dict[str, str]:
    with ds.open(path) as opened:
        return model_keys(opened, needed, prefix, str(path))


def saved(path: Path, **states: dict[str, torch.Tensor]) -> Path:
    ds.snapshot([from_state_dict(name, state) for name, state in states.items()], path).wait_committed()
    return path


def test_what_is_needed_is_what_the_model_has(model: LlamaForCausalLM, needed: Needed) -> None:
    assert needed.shapes == {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert needed.tied == {}
    assert needed_by(config(tie_word_embeddings=True)).tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_model_that_transformers_does_not_have_is_refused_by_name() -> None:
    for architectures in (["NoSuchForCausalLM"], [], None):
        one = config()
        one.architectures = architectures
        with pytest.raises(DatastatesError, match=str((architectures or [None])[0])):
            needed_by(one)


def _trained(path: Path, model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    ds.snapshot([from_stateful("optim", optimizer), from_stateful("policy", model)], path).wait_committed()


def _dcp(path: Path, model: Any) -> None:
    dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=path)


def _wrapped(path: Path, model: Any) -> None:
    saved(path, model={f"module.{name}": weight for name, weight in model.state_dict().items()})


SOURCES: list[tuple[Callable[[Path, Any], object], str]] = [
    (_trained, "policy/"),
    (_wrapped, "model/module."),
    (_dcp, "model."),
    (lambda path, model: torch.save({"a": {"net": model.state_dict()}, "lr": 1.0}, path), "a/net/"),
    (lambda path, model: save_file(model.state_dict(), path), ""),
    (lambda path, model: model.save_pretrained(path), ""),
]


@pytest.mark.parametrize(("make", "prefix"), SOURCES, ids=["ours", "DDP", "DCP", "torch", "safetensors", "folder"])
def test_a_model_is_found_wherever_it_lies(
    make: Callable[[Path, Any], object], prefix: str, model: LlamaForCausalLM, needed: Needed, tmp_path: Path
) -> None:
    make(tmp_path / "c", model)
    keys = found(tmp_path / "c", needed)
    assert keys == {name: prefix + name for name in needed.shapes}
    with ds.open(tmp_path / "c") as opened:
        assert [key for key in opened if key in keys.values()] == list(keys.values())
        for name, weight in model.state_dict().items():
            assert torch.equal(opened[keys[name]], weight)


def test_of_two_models_one_is_chosen_by_its_prefix(model: LlamaForCausalLM, needed: Needed, tmp_path: Path) -> None:
    path = saved(tmp_path / "c", ema=model.state_dict(), model=model.state_dict())
    with pytest.raises(DatastatesError, match=r"in several places: say by prefix= which, of: ema/, model/"):
        found(path, needed)
    assert found(path, needed, "ema/")[K] == f"ema/{K}"
    with pytest.raises(DatastatesError, match="lacks weights of the model below 'eam/'"):
        found(path, needed, "eam/")


WRAPPED: dict[str, Callable[[str], str]] = {
    "whole": str,
    "compiled": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "peft": lambda name: f"base_model.model.{name.replace('_proj.', '_proj.base_layer.')}",
    "lacking": lambda name: name.replace("norm", "Norm"),
}


@pytest.mark.parametrize("named", WRAPPED.values(), ids=WRAPPED)
def test_a_model_beside_the_one_that_is_wrapped_is_not_taken_for_it(
    named: Callable[[str], str], model: LlamaForCausalLM, needed: Needed, tmp_path: Path
) -> None:
    wrapped = {named(name): weight for name, weight in model.state_dict().items()}
    path = saved(tmp_path / "c", policy=wrapped, reference=model.state_dict())
    with pytest.raises(DatastatesError, match=r"several places.*policy/.*, reference/"):
        found(path, needed)
    assert found(path, needed, "reference/")[K] == f"reference/{K}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lora/layers.1.lora_A.weight", "trained weights beside the model below 'model/': merge them, or give prefix="),
        ("critic/v_head.weight", "trained weights beside"),
        ("model/prompt_encoder.embedding.weight", "trained weights beside"),
        ("model/layers/adapter", "has below 'model/' what the model does not have: model/layers/adapter"),
    ],
)
def test_what_was_trained_beside_the_model_is_named(
    name: str, said: str, model: LlamaForCausalLM, needed: Needed, tmp_path: Path
) -> None:
    top, _, rest = name.partition("/")
    state: dict[str, Any] = {"model": dict(model.state_dict())}
    inner = state.setdefault(top, {})
    *folders, last = rest.split("/")
    for folder in folders:
        inner = inner.setdefault(folder, {})
    inner[last] = torch.ones(2)
    torch.save(state, tmp_path / "m.pt")
    with pytest.raises(DatastatesError, match=said):
        found(tmp_path / "m.pt", needed)


@pytest.mark.parametrize("name", [K, "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_that_is_missing_is_named(name: str, model: LlamaForCausalLM, needed: Needed, tmp_path: Path) -> None:
    state = model.state_dict()
    del state[name]
    with pytest.raises(DatastatesError, match=f"lacks weights of the model below 'model/': {name}$"):
        found(saved(tmp_path / "c", model=state), needed)


def test_many_that_are_missing_are_counted(model: LlamaForCausalLM, needed: Needed, tmp_path: Path) -> None:
    state = {name: weight for name, weight in model.state_dict().items() if "self_attn" not in name}
    with pytest.raises(DatastatesError, match=r"q_proj.*and 3 more"):
        found(saved(tmp_path / "c", model=state), needed)


def test_another_model_is_told_by_what_is_there(needed: Needed, tmp_path: Path) -> None:
    with pytest.raises(DatastatesError, match=r"has no weights of the model, such as '.*'; it has: a/, b/"):
        found(saved(tmp_path / "c", a={"x": torch.ones(2)}, b={"y": torch.ones(2)}), needed)


@pytest.mark.parametrize("name", ["score.weight", "model.layers.2.input_layernorm.weight"])
def test_what_the_model_does_not_have_is_named(
    name: str, model: LlamaForCausalLM, needed: Needed, tmp_path: Path
) -> None:
    state = {**model.state_dict(), name: torch.ones(2, 2)}
    with pytest.raises(DatastatesError, match=f"below 'model/' what the model does not have: model/{name}$"):
        found(saved(tmp_path / "c", model=state), needed)


def test_frequencies_of_old_checkpoints_are_left(model: LlamaForCausalLM, needed: Needed, tmp_path: Path) -> None:
    state = {**model.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert set(found(saved(tmp_path / "c", model=state), needed)) == set(model.state_dict())


@pytest.mark.parametrize("change", [lambda w: torch.cat([w, w]), lambda w: w[:-1], lambda w: w.t(), lambda w: w[None]])
def test_another_shape_is_named(
    change: Callable[[torch.Tensor], torch.Tensor], model: LlamaForCausalLM, needed: Needed, tmp_path: Path
) -> None:
    state = {**model.state_dict(), K: change(model.state_dict()[K]).contiguous()}
    with pytest.raises(DatastatesError, match=rf"other shapes .*: {K}: \(.*\), and the model has \(8, 16\)"):
        found(saved(tmp_path / "c", model=state), needed)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn, torch.bool])
def test_what_is_no_floating_point_number_is_named(
    dtype: torch.dtype, model: LlamaForCausalLM, needed: Needed, tmp_path: Path
) -> None:
    state = {**model.state_dict(), K: model.state_dict()[K].to(dtype)}
    with pytest.raises(DatastatesError, match=f"no floating-point numbers: {K}: {str(dtype)[6:]}"):
        found(saved(tmp_path / "c", model=state), needed)


def test_of_tied_weights_one_is_enough(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    needed, head, first = needed_by(tied.config), "lm_head.weight", "model.embed_tokens.weight"
    keys = found(saved(tmp_path / "both", model=tied.state_dict()), needed)
    assert keys[head] == f"model/{head}"
    for left in (head, first):
        state = {name: weight for name, weight in tied.state_dict().items() if name != left}
        keys = found(saved(tmp_path / left, model=state), needed)
        assert keys[head] == keys[first] == f"model/{first if left == head else head}"


@pytest.mark.parametrize("layout", ["digests", "none"])
def test_tied_weights_that_differ_are_refused(layout: str, tied: LlamaForCausalLM, tmp_path: Path) -> None:
    state = {**tied.state_dict()}
    other = state["lm_head.weight"].clone()
    alike = other.clone() if layout == "digests" else other.t().contiguous().t()  # only row-major ones have a digest
    needed = needed_by(tied.config)
    assert found(saved(tmp_path / "alike", model={**state, "lm_head.weight": alike}), needed)
    alike[-1, -1] += 1
    with pytest.raises(DatastatesError, match=r"ties: model/lm_head\.weight, model/model\.embed_tokens\.weight"):
        found(saved(tmp_path / "c", model={**state, "lm_head.weight": alike}), needed)
