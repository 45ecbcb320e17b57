"""Training goes on while a checkpoint is captured, and the checkpoint still holds the state of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LARGE = """
directory = Path(sys.argv[1])
SMALL_CACHE = {"host_cache": "2MiB", "block": "1MiB"}

def wide(stage, **changed):
    return engine(stage, SMALL_CACHE, model=Net(512), **changed)

def noted(trained):
    # what each file is to hold, as it is when DeepSpeed hands it over
    own, expected = ours(trained), {}
    save = own.save
    def noting(state_dict, path):
        expected[Path(path)] = leaves(state_dict)
        save(state_dict, path)
    own.save = noting
    return expected

def check(trained, expected):
    ours(trained).wait()
    assert expected or rank() > 0, "no file was saved"
    for file, there in expected.items():
        wrong = differences(there, content(file))
        assert not wrong, f"{file.name}: {wrong}"
"""


@pytest.mark.by_hand
def test_the_files_hold_the_state_of_the_call(train: Any, tmp_path: Path) -> None:
    train(
        2,
        LARGE
        + """
for stage in (0, 2, 3):
    trained = wide(stage, gradient_accumulation_steps=2)
    # in the middle of an accumulation, and at its end
    for first, last in ((0, 3), (6, 8)):
        steps(trained, first, last)
        expected = noted(trained)
        with held("capture", until=GATE):
            trained.save_checkpoint(directory / f"{stage}-{last}")
            early = [snapshot.captured for snapshot in ours(trained).saves[-1].snapshots.values()]
            steps(trained, last, last + 3)
        check(trained, expected)
        assert not expected or not all(early), f"stage {stage}: nothing was left to capture after save_checkpoint()"
        del ours(trained).save
    trained.destroy()
""",
        tmp_path,
    )


@pytest.mark.long
def test_the_first_step_waits_for_capture_and_not_for_the_storage(train: Any, tmp_path: Path) -> None:
    train(
        2,
        LARGE
        + """
for stage in (2, 3):
    trained = wide(stage)
    steps(trained, 0, 1)
    with held("capture", until=GATE):
        trained.save_checkpoint(directory / f"capture-{stage}")
        save = ours(trained).saves[-1]
        loss = torch.nn.functional.cross_entropy(trained(tokens(1)).float(), tokens(1))
        trained.backward(loss)
        captured = [snapshot.captured for snapshot in save.snapshots.values()]
        assert not all(captured), "nothing was left to capture"
        trained.step()
        for snapshot in save.snapshots.values():
            snapshot.wait_captured(PATIENCE)  # it never is, if the step has not come to the gate
        gates = sum(report.gate_seconds for report in save.reports.values())
        assert gates > 0, "the wait is not in the report"
    ours(trained).wait()

    with held("sync"):
        trained.save_checkpoint(directory / f"storage-{stage}")
        save = ours(trained).saves[-1]
        steps(trained, 2, 4)
        for snapshot in save.snapshots.values():
            snapshot.wait_captured(PATIENCE)
        states = {report.state for report in save.reports.values()}
        assert states == {"captured"}, f"two steps waited for the storage: {states}"
        assert not save.ended
    ours(trained).wait()
    assert together(lambda: latest(directory / f"storage-{stage}")) in (None, "global_step2")
    trained.destroy()
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_steps_that_are_skipped_do_not_hurt(train: Any, tmp_path: Path) -> None:
    train(
        2,
        LARGE
        + """
trained = wide(2, bf16={"enabled": True, "check_grad_overflow": True})
steps(trained, 0, 2)
expected = noted(trained)
with held("capture", until=GATE):
    trained.save_checkpoint(directory)
    skipped = trained.skipped_steps
    loss = torch.nn.functional.cross_entropy(trained(tokens(2)).float(), tokens(2))
    trained.backward(loss * float("inf"))
    trained.step()
    assert trained.skipped_steps == skipped + 1, "the step was not skipped"
    steps(trained, 3, 5)
check(trained, expected)
trained.destroy()
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_several_engines_in_one_process(train: Any, tmp_path: Path) -> None:
    train(
        2,
        LARGE
        + """
one, other = wide(2), wide(3)
steps(one, 0, 2), steps(other, 0, 3)
first, second = noted(one), noted(other)
with held("capture", until=GATE):
    one.save_checkpoint(directory / "one")
    other.save_checkpoint(directory, tag="other")
    other.save_checkpoint(directory, tag="again")
    for number in range(3, 6):
        step(one, number)
        step(other, number)
check(one, first)
check(other, second)
one.destroy()
other.destroy()
dist.barrier()
assert latest(directory) == "again", latest(directory)
assert not [name for name in names(directory) if "partial" in name], names(directory)
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_moving_the_state_away_waits_for_capture(train: Any, tmp_path: Path) -> None:
    """DeepSpeed's ``offload_states`` frees what it has moved; it runs with ZeRO-3 on GPUs only."""
    train(
        1,
        LARGE
        + """
from datastates.adapters.deepspeed import binding

trained = wide(2)
steps(trained, 0, 1)
def captured(engine):
    return all(snapshot.captured for snapshot in save.snapshots.values())

with held("capture", until=(type(ours(trained)), "wait_captured")):
    trained.save_checkpoint(directory)
    save = ours(trained).saves[-1]
    assert not captured(trained)
    assert binding._after(lambda ours: ours.wait_captured(), captured)(trained), "it did not wait for the capture"
ours(trained).wait()
for name in ("offload_states", "reload_states"):
    assert getattr(type(trained), name).__wrapped__.__name__ == name
trained.destroy()
""",
        tmp_path,
    )
