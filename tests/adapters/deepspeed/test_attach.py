"""attach(): an engine made without the JSON file's entry saves as if with it; an unknown DeepSpeed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long


def test_an_engine_without_the_entry_saves_lazily_and_resumes(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
        from datastates.errors import SettingsError
        from datastates.adapters.deepspeed import attach

        directory = Path(sys.argv[1])
        trained = engine(entry=TORCH)
        try:
            attach(trained, host_cash="64MiB")
            raise AssertionError("a setting that there is not was taken")
        except SettingsError as error:
            assert "host_cash" in str(error)
        attached = attach(trained, host_cache="64MiB")
        assert ours(trained) is attached and attached.settings.host_cache == 64 << 20

        steps(trained, 0, 2)
        with held("sync"):
            trained.save_checkpoint(directory)
            at_save = state(trained)
            assert not attached.saves[-1].ended and latest(directory) is None
            losses = steps(trained, 2, 4)
        attached.wait()
        assert latest(directory) == "global_step2"

        resumed = engine(entry=TORCH)
        attach(resumed, host_cache="64MiB")
        path, _ = resumed.load_checkpoint(directory)
        assert path.endswith("global_step2/mp_rank_00_model_states.pt")
        assert not differences(state(resumed), at_save)
        assert steps(resumed, 2, 4) == losses
        resumed.save_checkpoint(directory)
        resumed.destroy()
        assert latest(directory) == "global_step4"
        trained.destroy()

        for taken in (resumed, engine()):
            try:
                attach(taken)
                raise AssertionError("attached beside another checkpoint engine")
            except ValueError as error:
                assert type(taken.checkpoint_engine).__name__ in str(error)
        """,
        tmp_path,
    )


def test_an_interface_that_is_not_known_is_refused_before_anything_is_saved(train: Any) -> None:
    train(
        1,
        """
        from deepspeed.runtime.engine import DeepSpeedEngine

        from datastates.adapters.deepspeed import attach

        original = DeepSpeedEngine.save_checkpoint
        DeepSpeedEngine.save_checkpoint = lambda self, path, tag=None: None
        trained = engine(entry=TORCH)
        for make in (lambda: attach(trained), lambda: engine()):
            try:
                make()
                raise AssertionError("bound to what is not known")
            except RuntimeError as error:
                message = f"DeepSpeed {deepspeed.__version__}: DeepSpeedEngine.save_checkpoint takes (path, tag)"
                assert message in str(error), error
        assert type(trained.checkpoint_engine).__name__ == "TorchCheckpointEngine"
        DeepSpeedEngine.save_checkpoint = original
        """,
    )
