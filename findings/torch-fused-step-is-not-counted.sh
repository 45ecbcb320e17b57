#!/bin/sh
# Behaviour: the step of a fused optimizer changes parameters and states without counting up their _version. So
#   autograd does not notice a step between forward and backward: the gradients are of other weights, where the other
#   implementations of the same optimizer raise. What looks at _version to find changed tensors misses them, too.
# Seen:
#   foreach: version 0 -> 2, backward raises, states' versions [1, 2]
#   for-loop: version 0 -> 2, backward raises, states' versions [1, 2]
#   fused: version 0 -> 0, backward gives gradients of other weights, states' versions [0, 0]
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="torch==2.13.0 numpy==2.4.6"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import sys

import torch

print("torch", torch.__version__)


def step(**how):
    """Step between a forward and its backward; returns the versions and how the backward ends."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, **how)
    inputs = torch.randn(2, 3, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    loss = (inputs @ weight).sum()
    expected = weight.detach().sum(1).expand(2, 3).clone()
    before = weight._version
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError:
        end = "raises"
    else:
        right = torch.allclose(inputs.grad, expected)
        end = "is right" if right else "gives gradients of other weights"
    states = [optimizer.state[weight][name]._version for name in ("exp_avg", "exp_avg_sq")]
    return before, weight._version, end, states


seen = {}
for name, how in {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}.items():
    seen[name] = before, after, end, states = step(**how)
    print(f"{name}: version {before} -> {after}, backward {end}, states' versions {states}")
described = seen["fused"] == (0, 0, "gives gradients of other weights", [0, 0]) and seen["foreach"][2] == "raises"
sys.exit(0 if described else 1)
EOF
venv/bin/python case.py
