"""A weight average that changes right after ``snapshot()`` tears a lazy snapshot; one that is not lazy saves it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import datastates as ds
from datastates.errors import TornSnapshotError
from datastates.providers import from_stateful

torch = pytest.importorskip("torch")

OPTIONS: dict[str, Any] = {"host_cache": "4MiB", "block": "1MiB"}


class Held(ds.StateProvider):
    """A provider of a lazy object, whose serialization holds the capture up until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__("held")
        self.go_on = threading.Event()

    def shards(self) -> Sequence[ds.Shard]:
        return [ds.object_shard(lazy=True)]

    def serialize(self, shard: ds.Shard) -> bytes:
        self.go_on.wait()
        return ds.dumps(None)

    def restore(self, shard: ds.Shard, value: Any) -> None:
        pass


def average() -> Any:
    return torch.optim.swa_utils.AveragedModel(
        torch.nn.Linear(512, 1024), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )


def test_an_average_updated_right_after_the_call_is_torn_and_the_error_names_the_remedy(tmp_path: Path) -> None:
    ema, held = average(), Held()
    ema.update_parameters(torch.nn.Linear(512, 1024))
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        provider = from_stateful("ema", ema, lazy=lambda _: True)  # by default, torch's average is copied at once
        snapshot = ckpt.snapshot([provider, held], step=0)
        ema.update_parameters(torch.nn.Linear(512, 1024))
        held.go_on.set()
        with pytest.raises(TornSnapshotError, match=r"'ema/module\.weight'.*from_stateful\(\.\.\., lazy=False\)"):
            snapshot.wait_committed()


def test_what_is_not_lazy_is_saved_as_it_was_at_the_call(tmp_path: Path) -> None:
    ema, held = average(), Held()
    provider = from_stateful("ema", ema, lazy=False)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        for step in range(3):  # later snapshots reuse the first one's description
            ema.update_parameters(torch.nn.Linear(512, 1024))
            before = copy.deepcopy(ema.state_dict())
            held.go_on.clear()
            snapshot = ckpt.snapshot([provider, held], step=step)
            ema.update_parameters(torch.nn.Linear(512, 1024))
            held.go_on.set()
            snapshot.wait_committed()
            torch.testing.assert_close(dict(ds.load(tmp_path)["ema"]), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("own", [False, True])
def test_nothing_of_a_module_or_an_optimizer_is_lazy_then(own: bool) -> None:
    model = torch.nn.Linear(3, 3)
    if own:  # a state_dict of the user's own
        model.state_dict = lambda: dict(torch.nn.Linear.state_dict(model))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    for obj in (model, optimizer):
        for lazy in (True, False):
            provider = from_stateful("m", obj, lazy=lazy)
            for _ in range(2):
                assert any(s.lazy for s in provider.shards() if not s.is_object) is lazy
