"""The load format for vLLM, with a stand-in for vLLM: what it hands over, and what it refuses.

``test_vllm.py`` serves with vLLM itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import datastates as ds
from datastates.errors import CheckpointNotFoundError, CorruptError, DatastatesError
from datastates.providers import from_stateful

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)


class World:
    """As vLLM's group of all workers, which are loaded one after the other here."""

    def __init__(self) -> None:
        self.size, self.rank_in_group, self.told = 1, 0, Any
        self.worker = self

    def broadcast_object(self, told: Any = None) -> Any:
        if self.rank_in_group == 0:
            self.told = told
        return self.told


WORLD = World()


class BaseModelLoader:
    """As vLLM's."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the load format registers itself as with a stand-in for vLLM."""
    found: dict[str, Any] = {}

    def register_model_loader(name: str) -> Callable[[Any], Any]:
        def register(loader: Any) -> Any:
            assert name not in found, "vLLM would warn"
            return found.setdefault(name, loader)

        return register

    for name in ("vllm", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    distributed: Any = sys.modules["vllm.distributed"]
    distributed.get_world_group = lambda: WORLD.worker
    distributed.get_tensor_model_parallel_world_size = lambda: WORLD.size
    base: Any = ModuleType("vllm.model_executor.model_loader.base_loader")
    base.BaseModelLoader = BaseModelLoader
    monkeypatch.setitem(sys.modules, base.__name__, base)
    loaders: Any = sys.modules["vllm.model_executor.model_loader"]
    loaders.register_model_loader = register_model_loader
    module = importlib.import_module("datastates.serving.vllm")
    module.register()
    module.register()
    yield found
    del sys.modules["datastates.serving.vllm"]


class Served(torch.nn.Module):
    """A model that takes weights by name, as vLLM's do, and says which."""

    def __init__(self, names: Iterable[str], leave: str = "", silent: bool = False) -> None:
        super().__init__()
        self.taken: dict[str, torch.Tensor] = {}
        self.names, self.leave, self.silent = names, leave, silent

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, None) for name in self.names)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        for name, weight in weights:
            if WORLD.size > 1 and weight.ndim == 2:
                n = weight.shape[0] // WORLD.size
                weight = weight.narrow(0, WORLD.rank_in_group * n, n)
            self.taken[name] = torch.empty(weight.shape).copy_(weight)
        return None if self.silent else self.taken.keys() - {self.leave}


def load(registered: dict[str, Any], served: Served, path: Path, quantization: str | None = None, **extra: Any) -> None:
    loader = registered["datastates"](SimpleNamespace(model_loader_extra_config=extra))
    config = SimpleNamespace(hf_config=CONFIG, model=str(path), quantization=quantization)
    loader.download_model(config)
    loader.load_weights(served, config)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG)


@pytest.fixture(scope="module")
def run(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    with ds.Checkpointer(path) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                model.model.norm.weight.fill_(step)
            checkpointer.snapshot([from_stateful("model", model)], step=step).wait_committed()
    return path


OWN = [name for name, _ in LlamaForCausalLM(CONFIG).named_parameters()]


def test_every_weight_is_handed_over_once(registered: dict[str, Any], model: Any, run: Path) -> None:
    served = Served(OWN)
    load(registered, served, run)
    assert served.taken.keys() == set(OWN)
    assert "lm_head.weight" not in served.taken
    for name, weight in served.taken.items():
        assert torch.equal(weight, model.state_dict()[name])


def test_a_head_of_its_own_gets_the_tied_weight(registered: dict[str, Any], model: Any, run: Path) -> None:
    served = Served([*OWN, "lm_head.weight"])
    load(registered, served, run)
    assert torch.equal(served.taken["lm_head.weight"], model.model.embed_tokens.weight)


def test_checkpoint_and_step_are_chosen(registered: dict[str, Any], run: Path, tmp_path: Path) -> None:
    served = Served(OWN)
    load(registered, served, tmp_path, checkpoint=str(run), step=1, prefix="model/")
    assert (served.taken["model.norm.weight"] == 1).all()
    with pytest.raises(CheckpointNotFoundError, match="step 3"):
        load(registered, served, run, step=3)
    with pytest.raises(ValueError, match="model_loader_extra_config: chekpoint is none of checkpoint, prefix, step"):
        load(registered, served, run, chekpoint="x")


def test_what_is_left_unset_is_named(registered: dict[str, Any], run: Path) -> None:
    with pytest.raises(DatastatesError, match=r"has not set model\.norm\.weight"):
        load(registered, Served(OWN, leave="model.norm.weight"), run)
    load(registered, Served(OWN, silent=True), run)
    with pytest.raises(DatastatesError, match="quantization='fp8'"):
        load(registered, Served(OWN), run, quantization="fp8")


def test_damage_is_found(registered: dict[str, Any], run: Path, model: Any, tmp_path: Path) -> None:
    data = bytearray((run / "step-00000002" / "rank-00000.pt").read_bytes())
    weight = model.model.layers[0].mlp.up_proj.weight.detach().numpy().tobytes()
    data[data.find(weight) + 5] ^= 1
    (tmp_path / "rank-00000.pt").write_bytes(data)
    with pytest.raises(CorruptError, match=r"mlp\.up_proj"):
        load(registered, Served(OWN), tmp_path / "rank-00000.pt")


def test_workers_take_the_first_ones_step_and_their_parts(
    registered: dict[str, Any], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WORLD, "size", 2)
    read: list[int] = []
    part = ds.Checkpoint.part
    monkeypatch.setattr(ds.Checkpoint, "part", lambda *a: (read.append(part(*a).numel()), part(*a))[1])
    with ds.Checkpointer(tmp_path) as checkpointer:
        for rank in (0, 1):
            monkeypatch.setattr(WORLD, "rank_in_group", rank)
            with torch.no_grad():
                model.model.norm.weight.fill_(rank + 5)
            checkpointer.snapshot([from_stateful("model", model)], step=rank + 5).wait_committed()
            served = Served(OWN)
            read.clear()
            load(registered, served, tmp_path)
            assert (served.taken["model.norm.weight"] == 5).all()
            assert sum(read) == sum(weight.numel() for weight in served.taken.values())
            for name, weight in served.taken.items():
                whole = model.state_dict()[name]
                assert name == "model.norm.weight" or torch.equal(
                    weight, whole.chunk(2)[rank] if whole.ndim == 2 else whole
                )
    monkeypatch.setattr(WORLD, "rank_in_group", 0)
    with pytest.raises(CheckpointNotFoundError):
        load(registered, Served(OWN), tmp_path / "nothing")
    monkeypatch.setattr(WORLD, "rank_in_group", 1)
    with pytest.raises(DatastatesError, match=r"the first worker cannot open .*nothing"):
        load(registered, Served(OWN), tmp_path / "nothing")


def test_a_draft_model_is_refused(registered: dict[str, Any], run: Path) -> None:
    loader = registered["datastates"](SimpleNamespace(model_loader_extra_config=None))
    config = SimpleNamespace(hf_config=CONFIG, model=str(run), quantization=None, runner="draft")
    with pytest.raises(DatastatesError, match="draft_load_config"):
        loader.load_weights(Served(OWN), config)


def test_another_path_is_reloaded_as_asked(registered: dict[str, Any], model: Any, run: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(9)
    ds.snapshot([from_stateful("model", model)], tmp_path / "other").wait_committed()
    extra = {"checkpoint": str(run), "step": 1}
    loader = registered["datastates"](SimpleNamespace(model_loader_extra_config=extra))
    config = SimpleNamespace(hf_config=CONFIG, model=str(tmp_path), quantization=None)
    loader.load_weights(Served(OWN), config)
    for path, value in ((config.model, 1), (str(tmp_path / "other"), 9)):
        config.model = path
        assert (dict(loader.get_all_weights(config, Served(OWN)))["model.norm.weight"] == value).all()


def test_reloading_reads_the_newest(registered: dict[str, Any], model: Any, tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer:
        loader = registered["datastates"](SimpleNamespace(model_loader_extra_config={}))
        config = SimpleNamespace(hf_config=CONFIG, model=str(tmp_path), quantization=None)
        for step in (3, 4):
            with torch.no_grad():
                model.model.norm.weight.fill_(step)
            checkpointer.snapshot([from_stateful("model", model)], step=step).wait_committed()
            weights = dict(loader.get_all_weights(config, Served(OWN)))
            assert weights.keys() == set(OWN)
            assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in weights.items())
            assert {type(weight) for weight in weights.values()} == {torch.Tensor}
