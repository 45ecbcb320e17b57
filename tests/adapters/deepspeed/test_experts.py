"""A model with experts: a rank has several files, and one rank saves the experts that several ranks hold alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from short import first

pytestmark = pytest.mark.long

EXPERTS = """
from deepspeed.moe.layer import MoE

root = Path(sys.argv[1])
WIDTH = 384

class Routed(torch.nn.Module):
    def __init__(self, count, ranks):
        super().__init__()
        # without a random choice of tokens: DeepSpeed's checkpoints hold no random states
        self.moe = MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), count, ep_size=ranks, use_rts=False)

    def forward(self, x):
        return x + self.moe(x)[0]

def mixed(entry, stage, dtype):
    torch.manual_seed(5)
    net = Net(WIDTH)
    # of the one layer each of two ranks has two experts; of the other each rank has both
    net.back = torch.nn.Sequential(net.back, Routed(4, 2), Routed(2, 1))
    return engine(stage, entry, dtype, model=net)
"""

CASES = [
    (4, "2-bf16"),
    (4, "0-fp32"),
    *((2, case) for case in ("0-fp32", "0-bf16", "1-fp32", "1-bf16", "2-bf16")),
]


@pytest.mark.by_hand
@pytest.mark.parametrize(("count", "case"), first(CASES, rest=pytest.mark.by_hand))
def test_experts_of_several_ranks(train: Any, tmp_path: Path, count: int, case: str) -> None:
    train(
        count,
        EXPERTS
        + """
stage, dtype = sys.argv[2].split("-")
like_torch(root, lambda entry: mixed(entry, int(stage), dtype), steps)
of_experts = sorted(file.name.split("_mp_")[0] for file in (root / "ours" / "global_step2").glob("*_expert_*"))
assert of_experts == [f"layer_0_expert_{n}" for n in range(4)] + [f"layer_1_expert_{n}" for n in range(2)]
""",
        tmp_path,
        case,
    )


def test_experts_are_not_for_another_number_of_ranks(train: Any, tmp_path: Path) -> None:
    train(
        2,
        EXPERTS
        + """
for stage in (1, 2):
    trained = mixed(OURS, stage, "bf16")
    steps(trained, 0, 1)
    trained.save_checkpoint(root / str(stage))
    refused(trained, root / str(stage), "the model has experts")
    trained.destroy()
    refused(engine(stage), root / str(stage), "is of a model with experts")
""",
        tmp_path,
    )
