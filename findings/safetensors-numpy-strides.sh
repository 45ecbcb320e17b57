#!/bin/sh
# Behaviour: safetensors.numpy 0.8.0 writes the memory from an array's first element on, whatever its strides. An array
#   that is transposed, in Fortran's order or a slice of columns comes back in its shape with other values, without an
#   error. 0.7.0 wrote the elements.
# Seen: (what comes back is equal, with 0.7.0 and with 0.8.0)
#   safetensors 0.7.0: whole True, transposed True, Fortran's order True, columns True
#   safetensors 0.8.0: whole True, transposed False, Fortran's order False, columns False
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="safetensors==0.8.0 numpy==2.4.6"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load, save

whole = np.arange(12.0).reshape(3, 4)
arrays = {"whole": whole, "transposed": whole.T, "Fortran's order": np.asfortranarray(whole), "columns": whole[:, :2]}
seen = {name: np.array_equal(load(save({"array": array}))["array"], array) for name, array in arrays.items()}
print(f"safetensors {safetensors.__version__}: " + ", ".join(f"{name} {same}" for name, same in seen.items()))
expected = sys.argv[1] == "True"
sys.exit(0 if list(seen.values()) == [True, expected, expected, expected] else 1)
EOF
venv/bin/pip install -q --disable-pip-version-check --target=before --no-deps safetensors==0.7.0 || exit 77
PYTHONPATH=before venv/bin/python case.py True
venv/bin/python case.py False
