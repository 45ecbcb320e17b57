#!/bin/sh
# Behaviour: torch.distributed.checkpoint takes a plain tensor, number or object of one name for the same on all ranks.
#   Of values that differ it writes one rank's, without a word. Which rank's depends on the sizes, because the writes
#   are spread over the ranks. So a checkpoint can hold the expert of one rank beside the router of another, a state
#   that no rank had.
# Seen: (each value was the number of its rank)
#   rank 0 loads: expert 0, router 1, position 1
#   rank 1 loads: expert 0, router 1, position 1
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
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.multiprocessing import spawn


def state(value):
    sizes = {"expert": 1000, "router": 900}
    return {name: torch.full((size,), float(value)) for name, size in sizes.items()} | {"position": value}


def work(rank, meeting):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    dcp.save(state(rank), checkpoint_id="checkpoint")
    loaded = state(-1)
    dcp.load(loaded, checkpoint_id="checkpoint")
    seen = {name: int(value[0] if torch.is_tensor(value) else value) for name, value in loaded.items()}
    print(f"rank {rank} loads: " + ", ".join(f"{name} {value}" for name, value in seen.items()), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if {seen["expert"], seen["router"]} == {0, 1} else 1)


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    spawn(work, (os.path.abspath("meeting"),), nprocs=2)
EOF
venv/bin/python case.py
