#!/bin/sh
# Behaviour: torch.distributed.checkpoint's get_optimizer_state_dict() steps an optimizer that has no state yet, with
#   zero gradients and lr=0. The step stays: Adam's count is one ahead for good, and Rprop, whose first step takes its
#   step sizes from lr, starts from the smallest ones and hardly moves. So a checkpoint before the first step changes
#   the run.
# Seen: (loss after 20 steps, without and with the call before them)
#   Rprop: 0.0229 and 1.8488, steps counted 20 and 21
#   AdamW: 0.8074 and 0.8294, steps counted 20 and 21
#   Adagrad: 1.3745 and 1.3745, steps counted 20 and 20 (its states exist before any step)
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

print("torch", torch.__version__)


def train(kind, ask):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 4)
    if ask:
        get_optimizer_state_dict(model, optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
    return round((model(inputs) - 1).square().mean().item(), 4), int(optimizer.state[model.bias]["step"])


differs = {}
for kind in (torch.optim.Rprop, torch.optim.AdamW, torch.optim.Adagrad):
    (plain, count), (asked, asked_count) = train(kind, False), train(kind, True)
    print(f"{kind.__name__}: {plain} and {asked}, steps counted {count} and {asked_count}")
    differs[kind.__name__] = plain != asked and asked_count == count + 1
sys.exit(0 if differs == {"Rprop": True, "AdamW": True, "Adagrad": False} else 1)
EOF
venv/bin/python case.py
