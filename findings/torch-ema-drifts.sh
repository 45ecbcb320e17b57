#!/bin/sh
# Behaviour: the moving average of a parameter that never changes does change, by torch's own get_ema_avg_fn in float32:
#   decay and 1 - decay are rounded apart and do not add up to one. The average moves at each of many hundred updates
#   and ends off the parameter, by 1.3e-5 of its value for a decay of 0.999. get_ema_multi_avg_fn keeps all bits.
# Seen: (an average of one frozen layer of 262,144 weights; how many the next update changes, and how far they are off)
#   get_ema_avg_fn, update 1: 40302 change, off by at most 1.2e-07
#   get_ema_avg_fn, update 100: 14053 change, off by at most 1.2e-05
#   get_ema_avg_fn, update 1000: 0 change, off by at most 1.3e-05
#   get_ema_multi_avg_fn, update 1000: 0 change, off by at most 0.0e+00
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
from torch.optim import swa_utils

print("torch", torch.__version__)


def average(shown, **how):
    """Average a frozen layer; returns by number of the update how many weights it changed, and how far they are off."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 512).requires_grad_(False)
    averaged = swa_utils.AveragedModel(layer, **how)
    averaged.update_parameters(layer)  # copies
    seen = {}
    for number in range(1, max(shown) + 1):
        before = averaged.module.weight.clone()
        averaged.update_parameters(layer)
        if number in shown:
            now = averaged.module.weight
            seen[number] = int((now != before).sum()), float(((now - layer.weight) / layer.weight).abs().max())
    return seen


one = average((1, 100, 1000), avg_fn=swa_utils.get_ema_avg_fn(0.999))
multi = average((1000,), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
for name, seen in {"get_ema_avg_fn": one, "get_ema_multi_avg_fn": multi}.items():
    for number, (changed, off) in seen.items():
        print(f"{name}, update {number}: {changed} change, off by at most {off:.1e}")
described = one[1][0] > 0 and one[100][0] > 0 and one[1000][1] > 1e-5 and multi[1000] == (0, 0.0)
sys.exit(0 if described else 1)
EOF
venv/bin/python case.py
