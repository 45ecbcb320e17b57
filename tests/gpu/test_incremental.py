"""Of state on a GPU, only what differs from the last checkpoint is captured and written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import datastates as ds
from datastates.commit import trial
from datastates.providers import from_state_dict, from_stateful
from datastates.storage import Location
from datastates.storage.local_files import LocalWriter

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, params=["ranges", "files"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let files share ranges, by copying them; or whole files only, as links."""

    def share(self: LocalWriter, source: Location, offset: int, nbytes: int, at: int) -> bool:
        with Path(source).open("rb") as file:
            file.seek(offset)
            os.pwrite(self._file.fileno(), file.read(nbytes), at)
        self._nbytes = max(self._nbytes, at + nbytes)
        return True

    monkeypatch.setattr(trial, "shares_ranges", lambda folder: request.param == "ranges")
    monkeypatch.setattr(LocalWriter, "share", share)
    return request.param


def test_rows_of_a_table_and_a_frozen_base(shared: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"w{i}": torch.randn(700_001 + i, device="cuda", dtype=torch.bfloat16) for i in range(5)}
    state |= {"table": torch.randn(20_000, 256, device="cuda"), "host": torch.randn(300_000)}
    expected: dict[int, dict[str, Any]] = {}
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(4):
            state["table"][[7, 9_000, 19_999]] += 1
            state["w3"][-1] += 1
            state["host"][5] += 1
            snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=step)
            expected[step] = {key: value.cpu().clone() for key, value in state.items()}
            with checkpointer.gate():
                state["w0"] += 0  # as an optimizer would, at once
            snapshot.wait_committed()
            figures = snapshot.report.executor
            assert (figures["in_full"] == "") == (step > (0 if shared == "ranges" else 1))
            # of the table, rows; of files, all that changes
            assert figures["in_full"] or figures["bytes"] < (3_000_000 if shared == "ranges" else 24_000_000)
        live = {key: torch.zeros_like(value) for key, value in state.items()}
        for step, then in expected.items():
            checkpointer.restore([from_state_dict("state", live)], step=step)
            assert all(torch.equal(live[key].cpu(), value) for key, value in then.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only: what lies on two was NOT looked at")
def test_what_lies_on_two_gpus_is_hashed_by_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    places = ("cuda:0", "cuda:1", "cpu")
    state = {f"{kind}.{place}": torch.randn(500_003, device=place) for kind in ("stays", "moves") for place in places}
    expected: dict[int, dict[str, Any]] = {}
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(4):
            for place in places:
                state[f"moves.{place}"] += 1
            snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=step)
            expected[step] = {key: value.cpu().clone() for key, value in state.items()}
            snapshot.wait_committed()
            assert step < 2 or snapshot.report.executor["in_full"] == ""
            assert step < 2 or snapshot.report.executor["shared"] > 3 * 1_900_000
        live = {key: torch.zeros_like(value) for key, value in state.items()}
        for step, then in expected.items():
            checkpointer.restore([from_state_dict("state", live)], step=step)
            assert all(torch.equal(live[key].cpu(), value) for key, value in then.items())
            assert all(live[key].device == value.device for key, value in state.items())


def test_a_loop_with_a_frozen_base_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(1)
        base, adapter = torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 64)
        base.requires_grad_(False)
        model = torch.nn.Sequential(base, torch.nn.ReLU(), adapter).cuda()
        return model, torch.optim.AdamW(adapter.parameters(), lr=1e-3)

    def train(model: Any, optimizer: Any, step: int) -> float:
        torch.manual_seed(step)
        loss = model(torch.randn(8, 2048, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    model, optimizer = make()
    losses = []
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(6):
            losses.append(train(model, optimizer, step))
            snapshot = checkpointer.snapshot([from_stateful("m", model), from_stateful("o", optimizer)], step=step)
        snapshot.wait_committed()
        assert snapshot.report.executor["bytes"] < 4_000_000
    for begun in range(5):
        model, optimizer = make()
        train(model, optimizer, 99)
        with ds.Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore([from_stateful("m", model), from_stateful("o", optimizer)], step=begun)
        assert [train(model, optimizer, step) for step in range(begun + 1, 6)] == losses[begun + 1 :]
