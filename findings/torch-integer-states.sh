#!/bin/sh
# Behaviour: Optimizer.load_state_dict() converts every state of a floating-point parameter to the parameter's dtype,
#   also integers and masks. Only the key "step" is left alone. A count of 2**24 + 1 loses its last bit, a mask is a
#   tensor of floats, and state_dict() of the loaded optimizer is not what was saved.
# Seen:
#   saved: seen torch.int64 [16777217], frozen torch.bool [True], step torch.int64 3
#   loaded: seen torch.float32 [16777216.0], frozen torch.float32 [1.0], step torch.int64 3
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
weight = torch.nn.Parameter(torch.ones(1))
states = {"seen": torch.tensor([2**24 + 1]), "frozen": torch.tensor([True]), "step": torch.tensor(3)}


class Counting(torch.optim.Optimizer):
    """Has integer and bool states beside its parameter."""

    def __init__(self, params):
        super().__init__(params, {})


saved, loaded = Counting([weight]), Counting([weight])
saved.state[weight] = states
loaded.load_state_dict(saved.state_dict())
for name, optimizer in (("saved", saved), ("loaded", loaded)):
    parts = (f"{key} {value.dtype} {value.tolist()}" for key, value in optimizer.state[weight].items())
    print(f"{name}: {', '.join(parts)}")
got = loaded.state[weight]
described = (
    got["seen"].dtype is torch.float32
    and got["seen"].item() == 2**24
    and got["frozen"].dtype is torch.float32
    and got["step"].dtype is torch.int64
)
sys.exit(0 if described else 1)
EOF
venv/bin/python case.py
