"""The pipeline engine, which steps by a way of its own, is gated too, and its files are those of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_two_stages(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
from deepspeed.pipe import LayerSpec, PipelineModule

root = Path(sys.argv[1])
WIDTH = 512

class Layer(torch.nn.Module):
    # changes a buffer in each forward pass
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.linear(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return torch.tanh(y - self.mean)

def pipeline(entry):
    torch.manual_seed(3)
    layers = [LayerSpec(Layer) for _ in range(6)]
    module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    made = engine(0, entry, "fp32", model=module, gradient_accumulation_steps=2)
    # a layer of one stage belongs to one rank
    assert len(module.forward_funcs) == 3
    return made

def batches(first):
    for number in range(first, 1000):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        yield x, x.flip(0)

def train_on(trained, first, last):
    data = batches(2 * first)
    return [float(trained.train_batch(data)) for _ in range(first, last)]

trained = pipeline(TORCH)
train_on(trained, 0, 2)
trained.save_checkpoint(root / "torch")
losses = train_on(trained, 2, 4)
end_state = leaves([trained.module.state_dict(), trained.optimizer.state_dict()])
trained.destroy()

trained = pipeline({"host_cache": "2MiB", "block": "1MiB"})
train_on(trained, 0, 2)
with fault("write", "delay", 60):
    trained.save_checkpoint(root / "ours")
    early = [snapshot.captured for snapshot in ours(trained).saves[-1].snapshots.values()]
    assert not all(early), "nothing was left to capture after save_checkpoint()"
    assert train_on(trained, 2, 4) == losses
    ours(trained).wait()
trained.destroy()
dist.barrier()

expected = names(root / "torch")
assert names(root / "ours") == expected, names(root / "ours")
for name in expected:
    if name.endswith(".pt"):
        different = differences(content(root / "torch" / name), content(root / "ours" / name))
        # the file names the folder that it is in, and the JSON file which engine saves; for torch's, DeepSpeed clones
        # a layer's tensors, and loses the versions of its modules
        theirs = ("/ds_config", "/module:", "._metadata")
        different = [line for line in different if not line.startswith(theirs)]
        assert not different, (name, different)

for writer, entry in (("ours", OURS), ("ours", TORCH), ("torch", OURS)):
    trained = pipeline(entry)
    path, _ = trained.load_checkpoint(root / writer)
    assert path, writer
    assert train_on(trained, 2, 4) == losses, (writer, entry)
    assert leaves([trained.module.state_dict(), trained.optimizer.state_dict()]) == end_state, (writer, entry)
    trained.destroy()
""",
        tmp_path,
    )
