#!/bin/sh
# Behaviour: state_dict() of a StatefulDataLoader that was not iterated yet makes its iterator. That draws from torch's
#   global generator, and with num_workers it starts the worker processes. load_state_dict() does neither. So reading
#   the state of a new loader, before a restore or for an early checkpoint, changes the random numbers of the run.
# Seen:
#   0 workers: state_dict() draws True, processes 0; load_state_dict() draws False, processes 0
#   2 workers: state_dict() draws True, processes 2; load_state_dict() draws False, processes 0
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="torch==2.13.0 torchdata==0.11.0 numpy==2.4.6"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import multiprocessing
import sys
from importlib.metadata import version

import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def seen(workers):
    def drawn(call):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        call()
        return not torch.equal(before, torch.get_rng_state()), len(multiprocessing.active_children())

    asked, given = (
        StatefulDataLoader(torch.arange(40), shuffle=True, batch_size=4, num_workers=workers) for _ in range(2)
    )
    used = StatefulDataLoader(torch.arange(40), shuffle=True, batch_size=4, num_workers=workers)
    next(iter(used))
    state = used.state_dict()
    del used
    load = drawn(lambda: given.load_state_dict(state))
    return drawn(asked.state_dict), load


if __name__ == "__main__":
    print("torch", torch.__version__, "torchdata", version("torchdata"))
    described = True
    for workers in (0, 2):
        ask, load = seen(workers)
        print(f"{workers} workers: state_dict() draws {ask[0]}, processes {ask[1]};", end=" ")
        print(f"load_state_dict() draws {load[0]}, processes {load[1]}")
        described &= ask == (True, workers) and load == (False, 0)
    sys.exit(0 if described else 1)
EOF
venv/bin/python -W ignore case.py
