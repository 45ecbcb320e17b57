"""A GPT of Megatron-Core with Megatron's own optimizers is gated, saved while training goes on, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

GPT = """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.overrides import TorchFunctionMode

    class OnTheCpu(TorchFunctionMode):
        # Megatron's optimizers name the device
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            result = func(*args, **kwargs)
            return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result

    def made(seed, bf16):
        dtype = torch.bfloat16 if bf16 else torch.float32
        config = TransformerConfig(
            num_layers=2, hidden_size=256, num_attention_heads=4, use_cpu_initialization=True, bf16=bf16,
            params_dtype=dtype, gradient_accumulation_fusion=False, bias_activation_fusion=False,
            masked_softmax_fusion=False, bias_dropout_fusion=False,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        )
        torch.manual_seed(seed)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=512, max_sequence_length=64)
        for parameter in model.parameters():
            if not getattr(parameter, "tensor_model_parallel", False):  # those are alike on all ranks
                dist.broadcast(parameter.data, 0)
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(), Float16Module(config, model) if bf16 else model
        )
        settings = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, bf16=bf16, params_dtype=dtype)
        return model, get_megatron_optimizer(settings, [model])

    def step(model, optimizer, number):
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * number + index)
            parameter.main_grad.copy_(torch.randn(parameter.main_grad.shape, generator=generator))
        optimizer.step()

    def sharded(model, optimizer, **options):
        described = model.module.sharded_state_dict()
        return {"model": described, "optimizer": optimizer.sharded_state_dict(described, **options), "iteration": 1}

    def weights(model):
        return {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
"""


@pytest.mark.by_hand
@pytest.mark.parametrize(("tp", "bf16"), [(1, True), (2, False)])
def test_a_gpt_is_saved_and_resumed(run: Any, tmp_path: Path, tp: int, bf16: bool) -> None:
    run(
        2,
        GPT
        + f"""
    directory = Path(sys.argv[1])
    parallel_state.initialize_model_parallel({tp})
    with OnTheCpu():
        model, optimizer = made(rank() % {tp}, {bf16})
        step(model, optimizer, 0)
        group = parallel_state.get_data_parallel_group()
        strategy = Ours.save(host_cache="2MiB", block="1MiB")
        saved = weights(model)
        with held("capture", until=GATE):
            request = save(
                sharded(model, optimizer), directory, FullyParallelSaveStrategyWrapper(strategy, group),
                async_sharded_save=True,
            )
            assert not strategy.last.captured, "nothing was left to capture after the call"
            step(model, optimizer, 1)
            assert strategy.last.report.gate_seconds > 0, "Megatron's optimizer did not wait"
        strategy.last.wait_captured(PATIENCE)
        request.execute_sync()
        trained = weights(model)
        assert differences(saved, trained)
        for reader in (Ours.load(), Stock.load()):
            again, its_optimizer = made(10 + rank() % {tp}, {bf16})
            state = load(sharded(again, its_optimizer, is_loading=True), directory, reader)
            again.module.load_state_dict(state["model"], strict=False)
            its_optimizer.load_state_dict(state["optimizer"])
            assert not differences(saved, weights(again))
            step(again, its_optimizer, 1)
            assert not differences(trained, weights(again)), "it does not train on alike"
""",
        tmp_path / "made",
    )
