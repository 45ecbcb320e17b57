"""A loop is killed at some changes of its files, and resumed; ``chaos/kill.py`` kills others, too, beside stock."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_path import module_at

runner = pytest.importorskip("ckpt_chaos.runner", reason="ckpt-chaos is not installed: nothing was killed")
kill = module_at(Path(__file__).parent / "chaos" / "kill.py")


def test_a_failed_resume_counts_after_a_run_that_ended_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*_words: object, **_options: object) -> list[object]:
        outcome = runner.ResumeOutcome(None, 4, 4, 0.0)
        return [runner.Row(v, crashed=False, drift=True, outcome=outcome, verdict=v) for v in ("PASS", "HARD_FAIL")]

    monkeypatch.setattr(kill, "ENVIRONMENT", {})
    monkeypatch.setattr(kill, "run_byo", rows)
    found = kill.verdicts(kill.CASES["Lightning"], "ours", tmp_path, points=2)
    assert found == {"PASS": kill.NOT_KILLED, "HARD_FAIL": "HARD_FAIL"}


@pytest.mark.by_hand
def test_every_kill_is_followed_by_a_resume_that_gives_the_same_result(tmp_path: Path) -> None:
    found = kill.verdicts(kill.CASES["loop"], "ours", tmp_path, points=4)
    assert {at: verdict for at, verdict in found.items() if verdict not in kill.GOOD} == {}
    assert "PASS" in found.values()


@pytest.mark.by_hand
@pytest.mark.long
def test_a_torn_file_breaks_a_loop_that_writes_by_torch_save(tmp_path: Path) -> None:
    found = kill.verdicts(kill.CASES["loop"], "stock", tmp_path, points=3, modes=["torn"])
    assert "HARD_FAIL" in found.values()
