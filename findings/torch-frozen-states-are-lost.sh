#!/bin/sh
# Behaviour: torch.distributed.checkpoint's get_optimizer_state_dict() gives the states of parameters that were frozen
#   since (requires_grad False), and set_optimizer_state_dict() drops them, without a word. Optimizer.load_state_dict()
#   keeps them. So a run that unfreezes after a resume starts these moments from nothing, and one without the resume
#   goes on with them.
# Seen: (the parameters that have states)
#   before: 0.weight, 0.bias, 1.weight, 1.bias
#   in what get_optimizer_state_dict() gives: 0.weight, 0.bias, 1.weight, 1.bias
#   after set_optimizer_state_dict(): 1.weight, 1.bias
#   after load_state_dict(): 0.weight, 0.bias, 1.weight, 1.bias
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

print("torch", torch.__version__)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
trained, given, loaded = (torch.optim.AdamW(model.parameters()) for _ in range(3))
model(torch.ones(1, 2)).sum().backward()
trained.step()
model.zero_grad()
model[0].requires_grad_(False)


def having(optimizer):
    return [name for name, parameter in model.named_parameters() if parameter in optimizer.state]


state = get_optimizer_state_dict(model, trained)
set_optimizer_state_dict(model, given, state)
loaded.load_state_dict(trained.state_dict())
seen = {
    "before": having(trained),
    "in what get_optimizer_state_dict() gives": list(state["state"]),
    "after set_optimizer_state_dict()": having(given),
    "after load_state_dict()": having(loaded),
}
for when, names in seen.items():
    print(f"{when}: {', '.join(names)}")
before, inside, after, plain = seen.values()
sys.exit(0 if len(before) == 4 and before == inside == plain and after == ["1.weight", "1.bias"] else 1)
EOF
venv/bin/python case.py
