"""Training goes on while a checkpoint is captured, and the checkpoint still holds the state of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LARGE = """
    directory = Path(sys.argv[1])
    SMALL = {"host_cache": "2MiB", "block": "1MiB"}
    parameters = {f"p{n}": torch.nn.Parameter(whole(f"p{n}", (512, 512), rank())) for n in range(6)}
    buffer, optimizer = torch.zeros(8), torch.optim.AdamW(parameters.values(), lr=0.1)

    def step():
        sum((p * p).sum() for p in parameters.values()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def sharded():
        tensors = {**{k: p.detach() for k, p in parameters.items()}, "buffer": buffer}
        for name, moments in zip(parameters, optimizer.state.values()):
            tensors[f"exp_avg.{name}"] = moments["exp_avg"]
        made = {k: ShardedTensor.from_rank_offsets(k, t, (0, rank(), 2)) for k, t in tensors.items()}
        groups = optimizer.state_dict()["param_groups"]
        return {"tensors": made, "groups": ShardedObject("groups", groups, (2,), (rank(),)), "steps": [1, 2]}

    def empty():
        made = sharded()
        for tensor in made["tensors"].values():
            tensor.data = torch.zeros_like(tensor.data)
        return made

    def copied():
        copied = plain(sharded())
        return {**copied, "tensors": {k: t.clone() for k, t in copied["tensors"].items()},
                "groups": json.loads(json.dumps(copied["groups"]))}

    def check(expected, where):
        found = load(empty(), where, Stock.load())
        found["groups"] = json.loads(json.dumps(found["groups"]))
        assert not differences(expected, found), differences(expected, found)
"""


# a persistent worker imports Megatron-Core anew
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.by_hand)])
def test_the_checkpoint_holds_the_state_of_the_call(run: Any, tmp_path: Path, persistent: bool) -> None:
    run(
        2,
        LARGE
        + f"""
    strategy, queue = Ours.save(**SMALL), AsyncCallsQueue(persistent={persistent})
    step()
    for number in range(2):
        expected, where = copied(), directory / str(number)
        with held("capture", until=GATE):
            request = save(sharded(), where, strategy, async_sharded_save=True)
            queue.schedule_async_request(request)
            buffer.add_(1)  # what is small may change at once, and so may objects
            optimizer.param_groups[0]["lr"] *= 0.5
            assert not strategy.last.captured, "nothing was left to capture after the call"
            step()
            assert strategy.last.report.gate_seconds > 0, "the optimizer did not wait for the capture"
        strategy.last.wait_captured(PATIENCE)
        step()
        assert not finished(where)
        queue.maybe_finalize_async_calls(blocking=True)
        assert finished(where)
        check(expected, where)
    queue.close()
""",
        tmp_path,
    )


@pytest.mark.long
def test_what_is_changed_too_early_is_named(run: Any, tmp_path: Path) -> None:
    run(
        2,
        LARGE
        + """
    strategy, queue = Ours.save(**SMALL), AsyncCallsQueue()
    step()
    with held("capture"):
        request = save(sharded(), directory / "torn", strategy, async_sharded_save=True)
        if rank() == 1:
            with torch.no_grad():
                parameters["p5"].mul_(2)
    queue.schedule_async_request(request)
    with pytest.raises(TornSnapshotError if rank() == 1 else CommitError, match="'.*p5'"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert not finished(directory / "torn")
    expected = copied()
    strategy = Ours.save(lazy=lambda key, tensor: key != "p5" and tensor.nbytes > 1 << 16, **SMALL)
    with held("capture"):
        request = save(sharded(), directory / "copied", strategy, async_sharded_save=True)
        with torch.no_grad():
            parameters["p5"].mul_(2)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    check(expected, directory / "copied")
""",
        tmp_path,
    )


def test_what_is_changed_while_the_ranks_plan_is_named(run: Any, tmp_path: Path) -> None:
    run(
        2,
        LARGE
        + """
    import threading
    from datastates.files.staging import Staged
    strategy = Ours.save(**SMALL)
    save(sharded(), directory / "first", strategy)  # a first one waits until the ranks have met
    second = directory / "second"
    together(second.mkdir)
    changed, checked, check = directory / "changed", threading.Event(), Staged.check
    Staged.check = lambda staged: (check(staged), checked.set())
    if rank() == 0:
        wait_for(changed.exists, "the change of rank 1, which plans with it in the meantime")
    request = strategy.async_save(sharded()["tensors"], second)
    if rank() == 1:
        assert checked.wait(PATIENCE)
        with torch.no_grad():
            parameters["p5"].mul_(2)
        changed.touch()
    with pytest.raises(TornSnapshotError if rank() == 1 else CommitError, match="'p5'|/p5'"):
        request.execute_sync()
    assert not names(second), names(second)
""",
        tmp_path / "made",
    )


def test_loading_waits_for_the_capture(run: Any, tmp_path: Path) -> None:
    run(
        2,
        LARGE
        + """
    strategy, queue = Ours.save(**SMALL), AsyncCallsQueue()
    step()
    save(sharded(), directory / "first", strategy)
    step()
    expected = copied()
    with held("capture", until=GATE):
        queue.schedule_async_request(save(sharded(), directory / "second", strategy, async_sharded_save=True))
        load(sharded(), directory / "first", Ours.load())  # into the very tensors
    queue.maybe_finalize_async_calls(blocking=True)
    check(expected, directory / "second")
""",
        tmp_path,
    )
