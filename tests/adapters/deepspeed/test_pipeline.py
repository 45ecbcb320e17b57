"""The pipeline engine, which steps in its own way, is gated too, and its files equal those of torch's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from short import first

pytestmark = pytest.mark.long

PIPELINE = """
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

root = Path(sys.argv[1])
WIDTH = 512

class Layer(torch.nn.Module):
    # changes a buffer in each forward pass, alike on all data-parallel ranks: DeepSpeed saves those of one
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * self.linear.bias.detach())
        return torch.tanh(self.linear(x) - self.mean.to(x.dtype))

CHANGED = {
    "gradient_accumulation_steps": 2,
    # the data-parallel ranks of a stage share its layers out
    "checkpoint": {"parallel_write": {"pipeline_stage": True}},
}

def pipeline(entry, stage, dtype, accumulated=None):
    torch.manual_seed(3)
    # the first layer's weights are the last one's as well, on another stage
    tied = TiedLayerSpec("tied", Layer, tied_weight_attr=["linear.weight"])
    layers = [tied, *(LayerSpec(Layer) for _ in range(4)), tied]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    made = engine(stage, entry, dtype, model=module, **CHANGED, data_types={"grad_accum_dtype": accumulated})
    # a layer belongs to one stage
    assert len(module.forward_funcs) == 3
    return made

def train_on(trained, first, last):
    dtype = next(trained.module.parameters()).dtype
    own = 1000 * trained.grid.get_data_parallel_rank()

    def batches():
        for number in range(2 * first, 2 * last):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number + own)).to(dtype)
            yield x, x.flip(0)

    data = batches()
    return [float(trained.train_batch(data)) for _ in range(first, last)]
"""
STAGES = """
stage, dtype, *accumulated = sys.argv[2].split("-")
like_torch(root, lambda entry: pipeline(entry, int(stage), dtype, *accumulated), train_on)
"""


# the third word is the type in which gradients are summed; with it DeepSpeed uses another optimizer for ZeRO-1
@pytest.mark.parametrize("case", first(["1-bf16", "0-fp32", "1-fp32", "1-bf16-fp32"], rest=pytest.mark.by_hand))
def test_two_stages(train: Any, tmp_path: Path, case: str) -> None:
    train(2, PIPELINE + STAGES, tmp_path, case)


@pytest.mark.by_hand
@pytest.mark.parametrize("case", first(["1-bf16", "0-fp32", "1-bf16-fp32"], rest=pytest.mark.by_hand))
def test_two_stages_on_two_ranks_each(train: Any, tmp_path: Path, case: str) -> None:
    train(4, PIPELINE + STAGES, tmp_path, case)


@pytest.mark.by_hand
def test_a_pipeline_is_not_for_another_number_of_ranks(train: Any, tmp_path: Path) -> None:
    train(
        2,
        PIPELINE
        + """
for accumulated, why in (("bf16", "the model is a pipeline"), ("fp32", "a BF16_Optimizer")):
    trained = pipeline(OURS, 1, "bf16", accumulated)
    train_on(trained, 0, 1)
    trained.save_checkpoint(root / accumulated)
    refused(trained, root / accumulated, why)
    trained.destroy()
""",
        tmp_path,
    )
    # a process that has had a pipeline cannot have any other DeepSpeed engine
    train(
        2,
        """
trained = engine(1)
steps(trained, 0, 1)
refused(trained, Path(sys.argv[1], "bf16"), "is of a pipeline")
refused(trained, Path(sys.argv[1], "fp32"), "holds no state of a ZeRO optimizer")
""",
        tmp_path,
    )
