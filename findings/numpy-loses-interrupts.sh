#!/bin/sh
# Behaviour: np.dtype((np.void, n)) and np.dtype(("S", n)) of numpy 2.4.6 swallow what a signal's handler raises meanwhile:
#   a KeyboardInterrupt is lost, and the program goes on. The length is tried as a type first; CPython runs handlers while
#   it makes the text of that error; and whatever was raised is cleared. np.dtype(f"V{n}") loses none.
# Seen: (of 200 signals that come while a loop makes types, those whose exception is lost)
#   ('V', 8): more than 50   ('S', 8): more than 50   'V8': 0   'S8': 0
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="numpy==2.4.6"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import signal
import sys

import numpy as np


class Interrupt(BaseException):
    pass


def lost(asked):
    handled = []

    def handle(number, frame):
        handled.append(number)
        raise Interrupt

    signal.signal(signal.SIGALRM, handle)
    count = 0
    for _ in range(200):
        handled.clear()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.003)
            while not handled:
                np.dtype(asked)
            count += 1
        except Interrupt:
            pass
    return count


seen = {asked: lost(asked) for asked in [("V", 8), ("S", 8), "V8", "S8"]}
print(f"numpy {np.__version__}:", *(f"{asked!r}: {count}" for asked, count in seen.items()), sep="   ")
sys.exit(0 if seen["V", 8] > 50 < seen["S", 8] and seen["V8"] == seen["S8"] == 0 else 1)
EOF
venv/bin/python case.py
