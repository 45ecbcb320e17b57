"""Tensors that consist of others, as states of torchao's optimizers under FSDP2, are saved and loaded as by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
from torchao import optim

root, words = Path(sys.argv[1]), sys.argv[2:]
torch.compiler.set_stance("force_eager")
KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def make(kind, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 512), nn.Linear(512, 3))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = getattr(optim, kind)(net.parameters(), lr=0.01)
    net(torch.randn(4, 256)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def parts(value):
    if isinstance(value, dict):
        return [part for item in value.values() for part in parts(item)]
    if isinstance(value, DTensor):
        return [value.placements, *parts(value.to_local())]
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return [type(value), str(context), *(part for name in names for part in parts(getattr(value, name)))]
    return [(value.dtype, value.reshape(-1).view(torch.uint8).tolist())] if isinstance(value, torch.Tensor) else [value]


def states(optimizer):
    return parts(optimizer.state_dict()["state"])


for kind in KINDS:
    if "save" in words:
        net, optimizer = make(kind, 1)
        state = {"optimizer": optimizer.state_dict()}
        before = states(optimizer)
        assert any("OptimState" in str(part) for part in before)
        dcp.save(state, checkpoint_id=root / kind / "stock")
        dcp.save(state, storage_writer=DataStatesStorageWriter(root / kind / "ours"))
        saved = ours.async_save(state, root / kind / "async")
        optimizer.step()
        saved.wait_committed()
        for name in ("ours", "async"):
            assert problems(root / kind / name) == []
    stock = None
    for name in ("stock", "ours", "async"):
        for reader in (dcp.FileSystemReader, DataStatesStorageReader):
            net, optimizer = make(kind, 2)
            state = {"optimizer": optimizer.state_dict()}
            try:
                dcp.load(state, storage_reader=reader(root / kind / name))
                optimizer.load_state_dict(state["optimizer"])
                found = states(optimizer)
            except Exception as error:
                assert stock is not None or name == "stock", (kind, name, error)
                found = type(error)
            stock = stock or found
            assert found == stock, (kind, name, reader)
    if "save" in words:
        assert stock == before
    say(kind, isinstance(stock, list))
"""


@pytest.mark.by_hand
def test_states_of_low_precision_are_as_with_torch(train: Any, said: Any, tmp_path: Path) -> None:
    """On two ranks, and from two to one, where torch's own reader can."""
    pytest.importorskip("torchao", reason="torchao is not installed: its optimizers were NOT tried")
    for done in train(2, SCRIPT, tmp_path, "save"):
        assert said(done) == {"AdamW8bit": True, "AdamW4bit": True, "AdamWFp8": True}
    (one,) = train(1, SCRIPT, tmp_path)
    assert said(one)["AdamW8bit"]
