#!/bin/sh
# Behaviour: Orbax' CheckpointManager with best_mode="min" takes a metric that is NaN for the best. It keeps that
#   checkpoint, and deletes the one with the smallest loss. So a run that diverged keeps its diverged state alone.
# Seen: (max_to_keep=1)
#   losses [2.0, 3.0]: best is step 0, kept [0]
#   losses [3.0, 2.0, nan]: best is step 2, kept [2]
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import logging
import os
import sys
from importlib.metadata import version

import jax.numpy as jnp
import orbax.checkpoint as ocp

print("orbax-checkpoint", version("orbax-checkpoint"), "jax", version("jax"))
logging.disable(logging.WARNING)


def save(name, losses):
    options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(os.path.abspath(name), options=options) as manager:
        for step, loss in enumerate(losses):
            manager.save(step, args=ocp.args.StandardSave({"x": jnp.full(3, step)}), metrics={"loss": loss})
            manager.wait_until_finished()
        print(f"losses {losses}: best is step {manager.best_step()}, kept {list(manager.all_steps())}")
        return manager.best_step(), list(manager.all_steps())


plain = save("plain", [2.0, 3.0])
diverged = save("diverged", [3.0, 2.0, float("nan")])
sys.exit(0 if plain == (0, [0]) and diverged == (2, [2]) else 1)
EOF
JAX_PLATFORMS=cpu venv/bin/python -W ignore case.py
