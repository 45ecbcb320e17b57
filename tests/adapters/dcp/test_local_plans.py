"""A rank's own plan is kept while nothing that it depends on changes, and is always what torch would plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageWriter
from datastates.adapters.dcp.save import global_plan
from datastates.adapters.dcp.save.local_plans import LocalPlans
from datastates.errors import DatastatesError
from datastates.files.staging import Staged
from states import SMALL, Parts, loaded, same


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


def state_of(mesh: Any) -> dict[str, Any]:
    sharded = DTensor.from_local(torch.randn(2, 6), mesh, (Shard(0), Replicate()))
    return {
        "model": {"w": torch.nn.Parameter(torch.randn(4, 6)), "d": torch.nn.Parameter(sharded), "b": torch.ones(3)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "epoch": 1,
    }


def plan(plans: LocalPlans, state: dict[str, Any], planner: DefaultSavePlanner | None = None) -> tuple[Any, Any]:
    """The plan of ``plans``, and torch's plan of the same state."""
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    return plans.plan(planner), planner.create_local_plan()


def values(state: dict[str, Any], mesh: Any) -> None:
    with torch.no_grad():
        state["model"]["w"] += 1
        state["model"]["d"].mul_(2)
    state["model"]["b"] = torch.zeros(3)
    state["optimizer"]["param_groups"][0]["lr"] = 0.2
    state["epoch"] = "two"


def copies(state: dict[str, Any], mesh: Any) -> None:
    for name, value in list(state["model"].items()):
        state["model"][name] = torch.nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)


@pytest.mark.parametrize("change", [values, copies])
def test_the_very_same_plan_while_only_contents_change(change: Callable[..., None], mesh: Any) -> None:
    plans, state = LocalPlans(), state_of(mesh)
    first, expected = plan(plans, state)
    assert first == expected
    change(state, mesh)
    again, expected = plan(plans, state)
    assert again is first
    assert again == expected


def placed(state: dict[str, Any], mesh: Any, *placements: Any) -> None:
    state["model"]["d"] = DTensor.from_local(torch.randn(2, 6), mesh, placements)


def put(path: str, value: Any) -> Callable[[dict[str, Any], Any], None]:
    def change(state: dict[str, Any], mesh: Any) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            state = state[parent]
        state[last] = value

    return change


CHANGES: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "a shape": put("model.b", torch.ones(4)),
    "a type": put("model.b", torch.ones(3, dtype=torch.bfloat16)),
    "as many elements in another shape": put("model.w", torch.nn.Parameter(torch.randn(6, 4))),
    "a gradient that is not wanted": put("model.w", torch.randn(4, 6)),
    "a tensor for a number": put("epoch", torch.tensor(1)),
    "a number for a tensor": put("model.b", 1),
    "one more": put("model.c", torch.ones(3)),
    "one less": lambda state, _: state["model"].pop("b"),
    "another order": lambda state, _: state.update(model=dict(reversed(state["model"].items()))),
    "a key with a dot for one within another": lambda s, _: s.update({"model.b": s["model"].pop("b")}),
    "a plain tensor for a DTensor": lambda s, _: s["model"].update(d=s["model"]["d"].to_local().detach()),
    "another dimension": lambda s, mesh: placed(s, mesh, Replicate(), Shard(1)),
    "replicated": lambda s, mesh: placed(s, mesh, Replicate(), Replicate()),
    "sharded by both": lambda s, mesh: placed(s, mesh, Shard(0), Shard(1)),
    "another mesh": lambda s, mesh: placed(s, mesh["b"], Shard(0)),
    "a larger whole": lambda s, mesh: s["model"].update(
        d=DTensor.from_local(torch.randn(2, 6), mesh, (Shard(0), Replicate()), shape=(3, 6), stride=(6, 1))
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_plan_where_it_is_made_of_something_else(what: str, mesh: Any) -> None:
    plans, state = LocalPlans(), state_of(mesh)
    first, _ = plan(plans, state)
    CHANGES[what](state, mesh)
    again, expected = plan(plans, state)
    assert again == expected != first
    assert plan(plans, state)[0] is again


def test_another_flattening_is_another_plan(mesh: Any) -> None:
    plans, state = LocalPlans(), state_of(mesh)
    first, _ = plan(plans, state)
    again, expected = plan(plans, state, DefaultSavePlanner(flatten_state_dict=False))
    assert again == expected != first


class Own(DefaultSavePlanner):
    """A planner of the user's, which may look at anything."""


def test_whoever_may_look_at_more_is_asked_each_time(mesh: Any) -> None:
    plans, state = LocalPlans(), state_of(mesh)
    first, _ = plan(plans, state, Own())
    assert plan(plans, state, Own())[0] is not first
    own = {"w": Parts.of((2, 3), {(0, 0): torch.ones(1, 3)})}
    before, _ = plan(plans, own)
    own["w"].boxes[1, 0] = torch.ones(1, 3)
    again, expected = plan(plans, own)
    assert again == expected != before


def test_a_local_tensor_that_describes_itself_is_asked_each_time(mesh: Any) -> None:
    """Those of row-wise sharded tables do, which look alike whatever they hold, and so do Megatron-FSDP's."""
    sharded = DTensor.from_local(torch.randn(2, 6), mesh, (Shard(0), Replicate()))
    local: Any = sharded._local_tensor
    plain: Any = torch.ones(2)
    for described in (local, plain):
        at = [0]
        items = Parts.of((9, 6), {(0, 0): torch.randn(2, 6)}).__create_write_items__
        described.__create_write_items__ = lambda fqn, _, at=at, items=items: items(fqn, None) * (1 + at[0])
        plans, state = LocalPlans(), {"d": sharded, "p": plain}
        before, _ = plan(plans, state)
        at[0] = 1
        again, expected = plan(plans, state)
        assert again == expected != before
        del described.__create_write_items__


def test_a_copy_says_of_itself_what_the_tensor_says(mesh: Any) -> None:
    sharded = DTensor.from_local(torch.randn(2, 6), mesh, (Shard(0), Replicate()))
    local: Any = sharded._local_tensor
    items = Parts.of((9, 6), {(5, 0): torch.randn(2, 6)}).__create_write_items__
    local.__create_write_items__ = lambda fqn, _: items(fqn, None)
    staged = Staged({"d": sharded}, lambda *_: False)
    first, expected = plan(LocalPlans(), staged.state_dict)
    staged.give_up(DatastatesError("it was to be looked at only"))
    assert staged.snapshot.exception() is not None
    assert first == expected == plan(LocalPlans(), {"d": sharded})[1]
    assert first.items[0].index.offset == torch.Size((5, 0))


def test_a_spec_that_is_changed_in_place_is_seen(mesh: Any) -> None:
    plans, state = LocalPlans(), state_of(mesh)
    before, _ = plan(plans, state)
    state["model"]["d"]._spec.placements = (Replicate(), Shard(1))
    again, expected = plan(plans, state)
    assert again == expected != before


def test_what_torch_refuses_is_refused_again(mesh: Any) -> None:
    plans, state = LocalPlans(), state_of(mesh)
    plan(plans, state)
    placed(state, mesh, Shard(0), Partial())
    for _ in range(2):
        with pytest.raises(ValueError, match="partial placements"):
            plan(plans, state)
    placed(state, mesh, Shard(0), Replicate())
    again, expected = plan(plans, state)
    assert again == expected


def test_a_plan_is_pickled_for_its_digest_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested = []
    digest = global_plan._digest
    monkeypatch.setattr(global_plan, "_digest", lambda plan: digested.append(plan) or digest(plan))
    state, writer = {"w": torch.ones(30_000), "epoch": 1}, DataStatesStorageWriter(**SMALL)
    for number, planner in enumerate((DefaultSavePlanner, DefaultSavePlanner, Own, *[DefaultSavePlanner] * 3)):
        made = planner()
        ours.async_save(state, tmp_path / str(number), storage_writer=writer, planner=made).wait_committed(30)
    writer.close()
    # the first plan, the other planner's, and the first planner's again
    assert len(digested) == 3


RANKS = 3


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
def test_ranks_that_keep_theirs_follow_one_that_does_not(
    together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They send the plans that they kept, of which they had compared only the digests before."""
    writers = [DataStatesStorageWriter(rank_timeout=10, **SMALL) for _ in range(RANKS)]
    planned: Counter[int] = Counter()
    create = DefaultSavePlanner.create_local_plan

    def counted(self: DefaultSavePlanner) -> Any:
        planned[self.state_dict["rank"]] += 1
        return create(self)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", counted)

    def save(rank: int, number: int, *, more: bool) -> None:
        state = {"rank": rank, f"of-{rank}": torch.full((30_000,), float(number)), "alike": torch.tensor(number)}
        if more and rank == 1:
            state["more"] = torch.full((5,), float(number))
        ours.async_save(state, tmp_path / str(number), storage_writer=writers[rank]).wait_committed(30)

    for number, more in enumerate((False, False, True, True, False)):
        together(RANKS, lambda rank, number=number, more=more: save(rank, number, more=more))
        expected = {f"of-{rank}": torch.full((30_000,), float(number)) for rank in range(RANKS)}
        expected |= {"alike": torch.tensor(number)} | ({"more": torch.full((5,), float(number))} if more else {})
        same(loaded(tmp_path / str(number), expected), expected)
    assert planned == {0: 1, 1: 3, 2: 1}
    together(RANKS, lambda rank: writers[rank].close())
