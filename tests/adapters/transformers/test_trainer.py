"""Checkpoints of a Trainer: lazily captured, complete or absent, and fit for a Trainer without this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import short
from by_path import module_at

from datastates.errors import SettingsError
from datastates.testing.provider_tests import difference

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # about loaders without pinned memory, and from transformers itself
IMPORTED = ("accelerate", "transformers.models.llama.modeling_llama", "transformers.trainer")


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


@pytest.mark.by_hand
def test_shards_of_fsdp1_are_those_that_the_trainer_saves(ranks: Any, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    options = {"timeout": 200, "imported": IMPORTED, "TOKENIZERS_PARALLELISM": "false"}
    for name, words in (("ours", ("fsdp1",)), ("stock", ("fsdp1", "stock"))):
        ranks(2, HERE / "training.py", tmp_path / name, 5, *words, **options)
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        found = []
        for name in ("ours", "stock"):
            dcp_to_torch_save(tmp_path / name / "checkpoint-5" / folder, tmp_path / f"{name}.pt")  # by torch's reader
            found.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
        assert difference(*found) is None
        ((kind, state),) = found[0].items()
        assert len(state["state"] if kind == "optimizer" else state) > 10


@pytest.mark.by_hand
def test_transformers_alone_reads_the_folder(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, 5)
    training.attach(made, **training.OPTIONS)
    made.train()
    tokens = torch.arange(16)[None]
    torch.save(made.model.eval()(tokens).logits, tmp_path / "logits.pt")
    script = f"""
import sys
sys.modules["datastates"] = None  # as if it were not installed
import torch, transformers
model = transformers.LlamaForCausalLM.from_pretrained({str(tmp_path / "checkpoint-5")!r}, use_safetensors=True)
assert torch.equal(model.eval()(torch.arange(16)[None]).logits, torch.load({str(tmp_path / "logits.pt")!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.by_hand
def test_folders_of_earlier_versions_are_resumed(training: ModuleType, tmp_path: Path) -> None:
    whole = training.trainer(tmp_path / "whole", 7)
    training.attach(whole, **training.OPTIONS)
    whole.train()
    folder = tmp_path / "whole" / "checkpoint-5"
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    again = training.trainer(tmp_path / "again", 7)
    training.attach(again, **training.OPTIONS)
    again.train(resume_from_checkpoint=str(folder))
    assert training.losses(again) == training.losses(whole)


def kinds(training: ModuleType) -> dict[str, Callable[[], Any]]:
    """Models whose files are not simply their state dict."""

    class Sharded(training.transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def save_pretrained(self, *words: Any, **options: Any) -> None:
            super().save_pretrained(*words, max_shard_size="60KB", **options)

    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "tie_word_embeddings": False}
    return {
        "in several files": lambda: Sharded(training.transformers.LlamaConfig(**small, **heads)),
        "stored otherwise than it computes": lambda: training.transformers.MixtralForCausalLM(
            training.transformers.MixtralConfig(**small, **heads, **experts)
        ),
        "in half precision": lambda: Sharded(training.transformers.LlamaConfig(**small, **heads)).bfloat16(),
    }


@pytest.mark.by_hand
@pytest.mark.parametrize(
    "kind", short.first(["in several files", "stored otherwise than it computes", "in half precision"])
)
def test_a_models_files_are_those_of_the_trainer(kind: str, training: ModuleType, tmp_path: Path) -> None:
    for name in ("stock", "ours"):
        training.transformers.set_seed(5)
        made = training.trainer(tmp_path / name, 2, kinds(training)[kind](), save_steps=2)
        if name == "ours":
            training.attach(made, **training.OPTIONS)
        training.transformers.set_seed(6)
        made.train()
    ours, stock = (tmp_path / name / "checkpoint-2" for name in ("ours", "stock"))
    files = {path.name for path in stock.glob("model*")}
    assert {path.name for path in ours.glob("model*")} == files
    assert ("model.safetensors.index.json" in files) == (kind != "stored otherwise than it computes")
    for name in files:
        assert (ours / name).read_bytes() == (stock / name).read_bytes(), name


def test_a_trainer_is_attached_once(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, 5)
    training.attach(made, **training.OPTIONS)
    with pytest.raises(ValueError, match="has been called for it"):
        training.attach(made, **training.OPTIONS)


def test_a_module_that_is_no_model_of_transformers(training: ModuleType, tmp_path: Path) -> None:
    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Embedding(64, 8)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, input_ids: Any, labels: Any) -> Any:
            self.seen += 1
            return {"loss": self.net(input_ids).square().mean()}

    made = training.trainer(tmp_path, 5, Net())
    training.attach(made, **training.OPTIONS)
    made.train()
    weights = load_file(tmp_path / "checkpoint-5" / "model.safetensors")
    assert weights["seen"].tolist() == [5.0] * 3
    assert torch.equal(weights["net.weight"], made.model.net.weight)


def test_what_it_cannot_do_is_refused(training: ModuleType, tmp_path: Path) -> None:
    made = training.trainer(tmp_path, 5)
    with pytest.raises(SettingsError, match="no_such"):
        training.attach(made, no_such=1)
    whole = training.FullyShardedDataParallelPlugin(fsdp_version=1).state_dict_type
    for name, version, hint in (
        ("is_deepspeed_enabled", 2, "datastates_ckpt"),
        ("is_fsdp_enabled", 1, "SHARDED_STATE_DICT"),
        ("is_fsdp_enabled", 2, "SHARDED_STATE_DICT"),
    ):
        refused = training.trainer(tmp_path, 5)
        plugin = SimpleNamespace(state_dict_type=whole)
        refused.accelerator = SimpleNamespace(is_fsdp2=version == 2, state=SimpleNamespace(fsdp_plugin=plugin))
        setattr(refused, name, True)
        with pytest.raises(ValueError, match=hint):
            training.attach(refused)
    refused = training.trainer(tmp_path, 5)
    refused.args = SimpleNamespace(**{**vars(refused.args), "push_to_hub": True, "world_size": 1})
    with pytest.raises(ValueError, match="push_to_hub"):
        training.attach(refused)
