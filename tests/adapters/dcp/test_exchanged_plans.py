"""A load plan goes to rank 0 and back as bytes. Planners still see, and change, the items of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from datastates.adapters.dcp import DataStatesStorageReader
from datastates.adapters.dcp.load.exchanged_plan import ExchangedPlan


def items() -> list[ReadItem]:
    begin, size = torch.Size([0]), torch.Size([3])
    places = [MetadataIndex(f"layer{i}", begin, 0) for i in range(3)]
    return [ReadItem(LoadItemType.TENSOR, place, begin, place, begin, size) for place in places]


def plan() -> LoadPlan:
    return LoadPlan(items(), planner_data={"kept": [1]})


def elsewhere(of: LoadPlan) -> LoadPlan:
    """What another process gets."""
    pickled = pickle.dumps(ExchangedPlan.of(of))  # nobody uses the sent plan any more
    received: LoadPlan = pickle.loads(pickled)
    return received


def back_and_forth(sent: LoadPlan) -> LoadPlan:
    received: LoadPlan = pickle.loads(pickle.dumps(sent))
    return received


def test_the_process_that_made_it_gets_the_items_back() -> None:
    original = plan()
    sent = ExchangedPlan.of(original)
    back = back_and_forth(sent)
    again = back_and_forth(back)  # as on rank 0, which sends its own plan to itself
    for one in (back, again):
        assert one == original
        assert all(a is b for a, b in zip(one.items, original.items, strict=True))
    back.items.pop()
    assert len(original.items) == len(sent.items) == 3
    assert back_and_forth(back).items == items()[:2]


def test_elsewhere_the_items_are_made_when_someone_asks() -> None:
    received = elsewhere(plan())
    passed_on = back_and_forth(received)
    assert not {"items"} & (vars(received).keys() | vars(passed_on).keys())
    assert passed_on == received == plan()


def _assign(received: LoadPlan) -> LoadPlan:
    received.items = items()[:2]
    return received


def _pop(received: LoadPlan) -> LoadPlan:
    received.items.pop()
    return received


@pytest.mark.parametrize(
    "change",
    [
        _assign,
        _pop,
        lambda received: replace(received, items=received.items[:2]),
        lambda received: LoadPlan(received.items[:2], received.storage_data, received.planner_data),
    ],
)
def test_other_items_of_a_planner_are_kept(change: Callable[[LoadPlan], LoadPlan]) -> None:
    own = ExchangedPlan.of(plan())
    for received in (elsewhere(plan()), own, pickle.loads(pickle.dumps(own))):
        assert back_and_forth(change(received)) == LoadPlan(items()[:2], planner_data={"kept": [1]})


def test_other_attributes_come_along() -> None:
    for received in (elsewhere(plan()), ExchangedPlan.of(plan())):
        received.planner_data = "new"
        vars(received)["rank"] = 3
        back = back_and_forth(received)
        assert vars(back)["rank"] == 3
        assert back == LoadPlan(items(), planner_data="new")
        assert replace(back, planner_data=None) == LoadPlan(items())
    assert ExchangedPlan.of(plan()) != LoadPlan(items())


class Unknown:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ImportError("no such class here")


def test_items_that_cannot_be_unpickled_are_not_lost() -> None:
    unknown: Any = Unknown()
    received = elsewhere(LoadPlan([unknown]))
    before = pickle.dumps(received)
    for _ in range(2):
        with pytest.raises(ImportError, match="no such class"):
            len(received.items)
    assert pickle.dumps(received) == before


class OwnPlan(LoadPlan):
    """The plan of a planner that pickles its plans in a way of its own."""


def test_a_planners_own_type_of_plan_stays(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path)
    seen: list[type[LoadPlan]] = []

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            return OwnPlan(super().create_local_plan().items)

        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            seen.append(type(new_plan))
            return super().finish_plan(new_plan)

    for planner in (DefaultLoadPlanner(), Planner()):
        into = {"w": torch.zeros(4)}
        dcp.load(into, storage_reader=DataStatesStorageReader(tmp_path), planner=planner)
        assert torch.equal(into["w"], torch.arange(4.0))
    assert seen == [OwnPlan]


def test_two_ranks(train: Any, tmp_path: Path) -> None:
    """No rank makes objects of another's items, unless its planner looks at them. What that planner changes is done."""
    train(
        2,
        """
from types import SimpleNamespace
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from datastates.adapters.dcp import DataStatesStorageReader
from datastates.adapters.dcp.load import exchanged_plan

root, rank = Path(sys.argv[1]), dist.get_rank()
dcp.save({f"w{i}": torch.full((4,), float(i)) for i in range(3)}, checkpoint_id=root)
made, loads = [], exchanged_plan.pickle.loads

def noted(pickled):
    made.append(pickled)
    return loads(pickled)

exchanged_plan.pickle = SimpleNamespace(loads=noted, dumps=exchanged_plan.pickle.dumps)

class Dropping(DefaultLoadPlanner):
    def create_global_plan(self, plans):
        assert [len(plan.items) for plan in plans] == [3, 3]
        plans[0].items.pop()
        plans[1].items.pop(0)
        return super().create_global_plan(plans)

for planner, kept in ((None, [0, 1, 2]), (Dropping(), [1, 2] if rank == 1 else [0, 1])):
    into = {f"w{i}": torch.full((4,), -1.0) for i in range(3)}
    dcp.load(into, storage_reader=DataStatesStorageReader(root), planner=planner)
    assert [into[f"w{i}"][0].item() for i in range(3)] == [float(i) if i in kept else -1.0 for i in range(3)]
    assert len(made) == (1 if planner and rank == 0 else 0)
""",
        tmp_path / "saved",
    )
