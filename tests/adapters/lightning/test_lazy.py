"""Which tensors the plugin captures while training goes on: only those that nothing but an optimizer's step changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hold import GATE, held

from datastates import _native

torch = pytest.importorskip("torch")

# Lightning's warnings about loaders, accelerators and existing checkpoints are not tested here
pytestmark = pytest.mark.filterwarnings("ignore")

LARGE = (4096, 16)
"""The shape of a tensor of 256 KiB. A write of few of its rows through ``.data`` leaves no trace."""


def _buffer(module: Any) -> None:
    module.register_buffer("table", torch.zeros(LARGE))


def _not_stepped(module: Any) -> None:
    module.table = torch.nn.Parameter(torch.zeros(LARGE))


def _stepped_by_another(module: Any) -> None:
    _not_stepped(module)
    module.net[2].weight.register_post_accumulate_grad_hook(lambda _: _write(module))


def _write(module: Any) -> None:
    """Change few rows, as a library does that sets unused codes of a codebook anew."""
    module.table.data[1000:1010] += 1


@pytest.mark.parametrize("make", [_buffer, _not_stepped, _stepped_by_another])
def test_state_that_training_changes_before_the_step_is_copied(
    make: Callable[[Any], None], training: ModuleType, io: Any, tmp_path: Path
) -> None:
    class Module(training.Module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any, index: int) -> Any:
            if make is not _stepped_by_another:
                _write(self)
            return super().training_step(batch, index)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters())

    training.quiet()
    module = Module(64)
    make(module)
    with held("capture", until=GATE):
        training.trainer(tmp_path, training.BATCHES + 2, io).fit(module, training.data())
    (path,) = tmp_path.glob("*.ckpt")
    table = torch.load(path, weights_only=True)["state_dict"]["table"]
    assert set(table[1000:1010].unique().tolist()) == {training.BATCHES}
    assert module.table[1000, 0] == training.BATCHES + 2


def test_an_average_that_a_validation_swaps_with_the_weights_is_copied(
    training: ModuleType, io: Any, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import WeightAveraging

    captured: list[bool] = []
    expected: dict[str, Any] = {}

    class Module(training.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(64)
            self.table = torch.nn.Embedding(*LARGE)
            self.large = torch.nn.Linear(16, 4096)  # its optimizer's state is lazy

        def training_step(self, batch: Any, index: int) -> Any:
            rows = self.table(torch.full((8,), 1000 + index))
            return self.large(rows).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:  # with the average in place of the weights
            for snapshot in io.snapshots.values():
                captured.append(snapshot.captured)
                _native.clear_faults()
                snapshot.wait_captured()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)

    class Watch(training.pl.Callback):  # type: ignore[misc, name-defined]
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            for name in ("state_dict", "current_model_state"):
                expected[name] = {k: v.clone() for k, v in checkpoint[name].items()}

    training.quiet()
    with held("capture"):
        trainer = training.trainer(tmp_path, training.BATCHES, io, WeightAveraging(), Watch())
        trainer.fit(Module(), training.data(), training.data())
    (path,) = tmp_path.glob("*.ckpt")
    found = torch.load(path, weights_only=True)
    assert captured[:1] == [False], "the save has waited for the capture"
    for name, state in expected.items():
        assert all(torch.equal(found[name][key], value) for key, value in state.items()), name
    assert not torch.equal(found["state_dict"]["table.weight"], found["current_model_state"]["table.weight"])


def test_a_callback_may_change_weights_behind_the_gate(training: ModuleType, io: Any, tmp_path: Path) -> None:
    from datastates.adapters import gate

    expected: dict[str, Any] = {}

    class Swap(training.pl.Callback):  # type: ignore[misc, name-defined]
        """Validates with other weights, as programs do that keep an average of them."""

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            waited.append(any(not snapshot.captured for snapshot in io.snapshots.values()))
            gate()
            for parameter in module.parameters():
                parameter.data.neg_()

        on_validation_end = on_validation_start

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            expected.update({k: v.clone() for k, v in checkpoint["state_dict"].items()})

    class Module(training.Module):  # type: ignore[misc, name-defined]
        def validation_step(self, batch: Any, index: int) -> None:
            del batch, index

    waited: list[bool] = []
    training.quiet()
    with held("capture", until=GATE):
        trainer = training.trainer(tmp_path, training.BATCHES, io, Swap())
        trainer.fit(Module(1024), training.data(), training.data())
    (path,) = tmp_path.glob("*.ckpt")
    assert True in waited, "the save has waited for the capture"
    found = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(found[key], value) for key, value in expected.items())
