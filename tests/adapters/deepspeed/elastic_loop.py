"""One rank of a job that saves checkpoints with DeepSpeed, and loads those of jobs of another size.

Arguments: a folder, the cases with commas between them or ``all``, then the actions in order: ``save``, ``load=N``
(what N ranks have saved), or ``refuse``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from datastates.adapters.deepspeed import load_checkpoint
from datastates.errors import CheckpointNotFoundError, CommitError, CorruptError, DatastatesError, RestoreError
from datastates.restoring.restore import Restore

ROOT = Path(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, MORE = 3, 2
STATES = ("exp_avg", "exp_avg_sq")

CASES: dict[str, dict[str, Any]] = {
    "zero-1": {"stage": 1, "bf16": True, "loaded by torch": True},
    "zero-1-large": {"stage": 1, "width": 40_031},
    "zero-2-round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}, "groups": True},
    "zero-2-numbers": {"stage": 2, "bf16": True, "numbers": True, "groups": True},
    "zero-3": {"stage": 3, "bf16": True, "groups": True},
    "zero-3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 300, "stage3_param_persistence_threshold": 10}},
}

if torch.cuda.is_available():
    CASES |= {f"zero-{stage}-half": {"stage": stage, "fp16": True} for stage in (1, 2, 3)}


class Net(torch.nn.Module):
    """Tied weights, frozen parameters, a buffer that the forward pass changes, and odd sizes."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(rows, 7)
        self.into = torch.nn.Linear(7, width)
        self.register_buffer("mean", torch.zeros(width))
        self.out = torch.nn.Linear(width, 7)
        self.frozen = torch.nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.head = torch.nn.Linear(7, rows, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(self.emb(x))
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0).to(self.mean.dtype))
        return self.head(self.frozen(self.out(torch.relu(h - self.mean.to(h.dtype)))))


class Numbers(torch.optim.AdamW):
    """An AdamW that keeps its step as a Python number, as DeepSpeed's own optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for state in filter(None, self.state.values()):
            state["step"] = torch.tensor(float(state["step"]))
        result = super().step(closure)
        for state in filter(None, self.state.values()):
            state["step"] = int(state["step"])
        return result


def build(case: dict[str, Any], seed: int, *, ours: bool = True) -> Any:
    torch.manual_seed(seed)
    net = Net(case.get("width", 13), case.get("rows", 31))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": case["stage"], **case.get("zero", {})},
        "zero_allow_untested_optimizer": True,
    }
    if ours:
        config["datastates_ckpt"] = {"host_cache_size": 0.05}
    for dtype in {"bf16", "fp16"} & case.keys():
        config[dtype] = {"enabled": True}
    trained: Any = [p for p in net.parameters() if p.requires_grad]
    if case.get("groups"):
        some = {id(p) for p in net.out.parameters()}
        trained = [
            {"params": [p for p in trained if id(p) not in some], "weight_decay": 0.1},
            {"params": list(net.out.parameters()), "weight_decay": 0.0},
        ]
    kind = Numbers if case.get("numbers") else torch.optim.AdamW
    return deepspeed.initialize(model=net, config=config, optimizer=kind(trained, lr=0.01))[0]


def train(engine: Any, steps: range) -> None:
    # ZeRO-1 and ZeRO-2 save the buffers of rank 0 only, so all ranks must have the same buffers
    own = RANK if engine.zero_optimization_stage() == 3 else 0
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + own)
        x = torch.randint(0, 31, (4,), generator=generator).to(engine.device)
        loss = torch.nn.functional.cross_entropy(engine(x).float(), x)
        assert loss.isfinite()
        engine.backward(loss)
        engine.step()


def gathered(optimizer: Any, number: int, flat: torch.Tensor) -> dict[Any, torch.Tensor]:
    """The parameters of one group of ZeRO-1 or ZeRO-2, put together out of the flat tensors of all ranks."""
    every = [torch.empty_like(flat) for _ in range(WORLD)]
    torch.distributed.all_gather(every, flat.contiguous())
    joined, at, found = torch.cat(every), 0, {}
    for parameter in optimizer.round_robin_bit16_groups[number]:
        found[parameter] = joined[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    return found


def state_of(engine: Any) -> dict[str, Any]:
    """The whole training state, with full tensors by parameter. It is the same on all ranks."""
    optimizer, found = engine.optimizer, {}
    if engine.zero_optimization_stage() < 3:
        # DeepSpeed's own look-up misses the states of a second group, and uses another order with round_robin_gradients
        for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            states = optimizer.optimizer.state[flat]
            for state, tensor in (("fp32", flat.detach()), *((s, states[s]) for s in STATES)):
                for parameter, value in gathered(optimizer, number, tensor).items():
                    found[f"{state} {engine.param_names[parameter]}"] = value.clone()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and engine.zero_optimization_stage() == 3:
            found[f"fp32 {name}"] = safe_get_full_fp32_param(parameter).clone()
            for state in STATES:
                found[f"{state} {name}"] = safe_get_full_optimizer_state(parameter, state).clone()
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"weight {name}"] = parameter.detach().clone()
    for states in optimizer.optimizer.state.values():
        found["step"] = float(states["step"])
    groups = optimizer.optimizer.param_groups
    found["groups"] = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
    found["scale"] = optimizer.loss_scaler.cur_scale
    found["counters"] = engine.global_steps, engine.skipped_steps, engine.lr_scheduler.state_dict()
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def buffers(engine: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.to("cpu", copy=True) for name, buffer in engine.module.named_buffers()}


def assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), (where, one.keys() ^ other.keys())
        for key in one:
            assert_same(one[key], other[key], f"{where}: {key}")
    else:
        assert one == other, (where, one, other)


def wait(engine: Any) -> None:
    if hasattr(engine.checkpoint_engine, "ckpt_engine"):
        engine.checkpoint_engine.ckpt_engine.wait()


def save(case: str) -> None:
    folder = ROOT / f"{case}-of-{WORLD}"
    engine = build(CASES[case], 1)
    train(engine, range(STEPS))
    engine.optimizer.loss_scaler.cur_scale = 2.0  # not the default
    engine.save_checkpoint(str(folder), client_state={"case": case})
    truth = {"state": state_of(engine), "buffers": buffers(engine)}
    train(engine, range(STEPS, STEPS + MORE))
    truth["later"] = state_of(engine), buffers(engine)
    wait(engine)
    torch.save(truth, folder / f"truth-{RANK}")
    engine.destroy()


def load(case: str, ranks: int) -> None:
    folder = ROOT / f"{case}-of-{ranks}"
    truth = torch.load(folder / f"truth-{RANK % ranks}", weights_only=False)
    engine = build(CASES[case], 2, ours="loaded by torch" not in CASES[case])
    if ranks < WORLD:  # otherwise the engine's optimizer has no state yet
        train(engine, range(1))
    with counted() as tallies:
        path, client_state = load_checkpoint(engine, folder)
    assert Path(path).parent.parent == folder
    assert client_state["case"] == case
    assert_same(state_of(engine), truth["state"], f"{case}, {ranks} to {WORLD}")
    assert_same(buffers(engine), truth["buffers"], f"{case}, buffers")
    (tally,) = tallies
    # small states are verified as a whole, whatever that reads
    assert "width" in CASES[case] or not tally.unverified_keys
    assert "width" not in CASES[case] or tally.read_nbytes - tally.shared_nbytes < 1.05 * tally.needed_nbytes
    # saved by this number of ranks and loaded by DeepSpeed itself, training goes on alike
    again = ROOT / f"{case}-of-{ranks}-on-{WORLD}"
    engine.save_checkpoint(str(again))
    train(engine, range(STEPS, STEPS + MORE))
    wait(engine)
    other = build(CASES[case], 3)
    other.load_checkpoint(str(again))
    train(other, range(STEPS, STEPS + MORE))
    later = state_of(engine)
    assert_same(later, state_of(other), f"{case}, after more steps")
    if ranks == WORLD:
        assert_same(later, truth["later"][0], f"{case}, unbroken")
        assert_same(buffers(engine), truth["later"][1], f"{case}, unbroken")
    engine.destroy()
    other.destroy()


class counted:
    """Collects what each restore within the block has read."""

    def __enter__(self) -> list[Any]:
        self._own, tallies = Restore.run, []

        def run(restore: Restore) -> Any:
            tallies.append(self._own(restore))
            return tallies[-1]

        Restore.run = run
        return tallies

    def __exit__(self, *_: object) -> None:
        Restore.run = self._own


def refuse(case: str) -> None:
    """Check that what does not fit is named, and changes nothing on any rank."""
    folder = ROOT / f"{case}-of-{WORLD}"
    engine = build(CASES[case], 4)
    train(engine, range(1))

    def fails(kind: type[Exception], match: str, where: Path, tag: str | None = None, live: Any = engine) -> None:
        before = state_of(live)
        with pytest.raises(kind, match=re.escape(match)):
            load_checkpoint(live, where, tag)
        assert_same(state_of(live), before, "after a refusal")

    fails(CheckpointNotFoundError, "nothing-like-it", folder, "nothing-like-it")
    assert load_checkpoint(engine, ROOT / "none") == (None, None)
    other = 3 if CASES[case]["stage"] < 3 else 1
    fails(RestoreError, f"ZeRO-{other}", ROOT / f"zero-{other}-of-{WORLD}")
    for difference, match in (({"rows": 37}, "(31, 7)"), ({"width": 11}, "(13,)"), ({"groups": other == 3}, "group")):
        wrong = build({**CASES[case], **difference}, 4)
        train(wrong, range(1))
        fails(RestoreError, match, folder, live=wrong)
        wrong.destroy()

    broken = ROOT / f"{case}-broken"
    name = f"{'bf16_' if 'bf16' in CASES[case] else ''}zero_pp_rank_{WORLD - 1}_mp_rank_00_optim_states.pt"
    file = broken / f"global_step{STEPS}" / name
    if RANK == 0:
        shutil.copytree(folder, broken)
        torch.save(torch.load(file, weights_only=False), file.with_suffix(".torch"))
        file.rename(file.with_suffix(".whole"))
    torch.distributed.barrier()
    fails(DatastatesError, name, broken)
    torch.distributed.barrier()
    if RANK == 0:
        file.with_suffix(".torch").rename(file)
    torch.distributed.barrier()
    fails(DatastatesError, "ds_to_universal", broken)
    torch.distributed.barrier()
    if RANK == 0:
        data = bytearray(file.with_suffix(".whole").read_bytes())
        data[200] ^= 1  # in the first record
        file.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(CorruptError if RANK == WORLD - 1 else CommitError, match=re.escape(name)):
        load_checkpoint(engine, broken)
    # the same engine then loads the whole checkpoint
    load_checkpoint(engine, folder)
    truth = torch.load(folder / f"truth-{RANK}", weights_only=False)
    assert_same(state_of(engine), truth["state"], "after a failure")
    engine.destroy()


def main() -> None:
    logging.disable(logging.WARNING)
    cases = CASES if sys.argv[2] == "all" else sys.argv[2].split(",")
    for word in sys.argv[3:]:
        if word == "refuse":
            refuse("zero-1")
            refuse("zero-3")
            continue
        for case in cases:
            if word == "save":
                save(case)
            else:
                load(case, int(word.removeprefix("load=")))


main()
sys.stdout.flush()
os._exit(0)  # leftover threads of torch sometimes abort a process that ends normally
