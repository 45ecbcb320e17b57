#!/bin/sh
# Behaviour: torch conjugates lazily: conj() gives a view with a mark. The view counts as contiguous, so safetensors
#   writes the memory below it without the mark, and the imaginary parts come back with the other sign. torch.save
#   keeps the mark, and torch.distributed.checkpoint writes the values.
# Seen:
#   saved: [(1-2j), (3-4j)], contiguous True
#   safetensors gives [(1+2j), (3+4j)]
#   torch.save gives [(1-2j), (3-4j)]
#   torch.distributed.checkpoint gives [(1-2j), (3-4j)]
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="torch==2.13.0 safetensors==0.8.0 numpy==2.4.6"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import sys

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

print("torch", torch.__version__, "safetensors", safetensors.__version__)
values = torch.tensor([1 + 2j, 3 + 4j]).conj()
state = {"values": values}
print(f"saved: {values.tolist()}, contiguous {values.is_contiguous()}")
save_file(state, "a.safetensors")
torch.save(state, "a.pt")
dcp.save(state, checkpoint_id="a")
gathered = {"values": torch.zeros(2, dtype=values.dtype)}
dcp.load(gathered, checkpoint_id="a")
loaded = {
    "safetensors": load_file("a.safetensors"),
    "torch.save": torch.load("a.pt"),
    "torch.distributed.checkpoint": gathered,
}
for name, got in loaded.items():
    print(f"{name} gives {got['values'].tolist()}")
same = [torch.equal(got["values"], values) for got in loaded.values()]
sys.exit(0 if same == [False, True, True] and torch.equal(loaded["safetensors"]["values"], values.conj()) else 1)
EOF
venv/bin/python -W ignore case.py
