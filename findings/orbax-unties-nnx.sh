#!/bin/sh
# Behaviour: a Flax NNX module is a pytree, and jax.tree_util lists a Variable twice that two layers share. So Orbax
#   takes a module, and gives back one whose tied weights are two with equal values. They come apart at the next step.
#   nnx.state() lists the Variable once, and nnx.update() with what Orbax restores keeps the tie.
# Seen:
#   leaves of the module 4, of its state 3
#   restored as a module: equal True, tied False
#   restored as its state: equal True, tied True
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="orbax-checkpoint==0.12.8 flax==0.12.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import os
import sys
from importlib.metadata import version

import jax
import orbax.checkpoint as ocp
from flax import nnx

print(*(f"{name} {version(name)}" for name in ("orbax-checkpoint", "flax", "jax")))


class Net(nnx.Module):
    def __init__(self, seed):
        self.first, self.last = (nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for _ in range(2))
        self.last.kernel = self.first.kernel


def through(name, tree, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(name), tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(os.path.abspath(name), like)


saved, updated = Net(0), Net(1)
leaves = [len(jax.tree_util.tree_leaves(tree)) for tree in (saved, nnx.state(saved))]
print(f"leaves of the module {leaves[0]}, of its state {leaves[1]}")
module = through("module", saved, Net(1))
nnx.update(updated, through("state", nnx.state(saved), nnx.state(updated)))
seen = []
for name, net in (("a module", module), ("its state", updated)):
    equal = bool((net.first.kernel[...] == saved.first.kernel[...]).all())
    seen.append((equal, net.first.kernel is net.last.kernel))
    print(f"restored as {name}: equal {equal}, tied {seen[-1][1]}")
sys.exit(0 if leaves == [4, 3] and seen == [(True, False), (True, True)] else 1)
EOF
JAX_PLATFORMS=cpu venv/bin/python -W ignore case.py
