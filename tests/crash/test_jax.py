"""Training by flax and optax is killed while a checkpoint is written, and resumes bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: its training was NOT killed")
import jax_loop  # noqa: E402

STEPS, KILLED = 5, 4


@pytest.mark.by_hand
def test_a_killed_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-P", jax_loop.__file__, tmp_path / "killed", str(STEPS)],
        env={**os.environ, "DATASTATES_FAULTS": f"store.rename=kill@{KILLED}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed, found = jax_loop.main(tmp_path / "killed", STEPS)
    assert resumed is not None
    assert 0 < resumed < STEPS
    begun, expected = jax_loop.main(tmp_path / "through", STEPS)
    assert begun is None
    pairs = zip(*(jax.tree.leaves({**s, "rng": jax.random.key_data(s["rng"])}) for s in (found, expected)), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
