"""The loops of docs/loops.md end with the same weights plain, with checkpoints, and ended and resumed."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest

import datastates as ds

torch = pytest.importorskip("torch")

PAGE = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
COMMON, *LOOPS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FOLDERS = re.findall(r'"ckpts/([\w-]+)"', PAGE)


class Plain:
    """Stands for a checkpointer in a loop without checkpoints."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None: ...

    def restore(self, _: Any) -> None: ...

    def gate(self) -> None: ...

    def snapshot(self, *_: Any, step: int) -> None: ...


class Killed(Exception):
    """Ends a loop where a kill would."""


class Ending(ds.Checkpointer):
    """A checkpointer of a run that ends when its second snapshot is committed."""

    taken = 0

    def snapshot(self, providers: Any, *, step: int, **options: Any) -> ds.Snapshot:
        snapshot = super().snapshot(providers, step=step, **options)
        self.taken += 1
        if self.taken == 2:
            snapshot.wait_committed()
            raise Killed
        return snapshot


def run(loop: str, checkpointer: type) -> dict[str, Any]:
    """Run the loop; returns the tensors of all its modules."""
    names: dict[str, Any] = {}
    exec(COMMON, names)
    names["ds"] = types.SimpleNamespace(Checkpointer=checkpointer)
    exec(loop, names)
    modules = {n: m for n, m in names.items() if isinstance(m, torch.nn.Module)}
    return {f"{n}.{k}": v.clone() for n, m in modules.items() for k, v in m.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch, in torch.compile
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, id=name, marks=[pytest.mark.long] if name == "compiled" else [])
        for loop, name in zip(LOOPS, FOLDERS, strict=True)
    ],
)
def test_checkpoints_and_a_resume_change_nothing(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = run(loop, Plain)
    assert plain
    with pytest.raises(Killed):
        run(loop, Ending)
    (folder,) = Path("ckpts").iterdir()
    assert len(list(folder.glob("step-*"))) == 2
    torch.testing.assert_close(run(loop, ds.Checkpointer), plain, rtol=0, atol=0)
    assert len(list(folder.glob("step-*"))) == 4


def test_every_page_counts_the_steps_that_are_done() -> None:
    """A snapshot has the number of steps that are done, so that a loop begins again at ``restored.step``."""
    root = Path(__file__).parents[2]
    for page in (root / "README.md", *(root / "docs").rglob("*.md"), *(root / "docs").rglob("*.ipynb")):
        text = page.read_text()
        assert "restored.step + 1" not in text, page
        for begin in re.findall(r"range\(([^,\n]*restored[^,\n]*),", text):
            assert begin in ("restored.step if restored else 0", "0 if restored is None else restored.step"), page
