#!/bin/sh
# Behaviour: an in-place operation on a DTensor counts up the _version of the DTensor and not that of its local
#   tensor. One on the local tensor counts up that of the local tensor only. So neither number tells of all changes of
#   the memory that both share.
# Seen: (version of the DTensor, version of its local tensor)
#   new: (0, 0)
#   after an operation on the DTensor: (1, 0)
#   after an operation on its local tensor: (1, 1)
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
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

print("torch", torch.__version__)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
whole = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
seen = []


def look(when):
    seen.append((whole._version, whole.to_local()._version))
    print(f"{when}: {seen[-1]}")


look("new")
whole.mul_(2)
look("after an operation on the DTensor")
whole.to_local().mul_(2)
look("after an operation on its local tensor")
assert torch.equal(whole.full_tensor(), torch.full((4,), 4.0))
dist.destroy_process_group()
sys.exit(0 if seen == [(0, 0), (1, 0), (1, 1)] else 1)
EOF
venv/bin/python case.py
