"""``framework="np"``: checkpoints of every format become arrays of NumPy, and torch is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from cases import CASES, weights

SLOW = {"trainer", "lightning"}
"""Formats whose libraries train; their files are read as those of torch and safetensors."""
READ = """
import sys
from pathlib import Path
import numpy as np
import datastates as ds

def leaves(value):
    return [leaf for item in value.values() for leaf in leaves(item)] if isinstance(value, dict) else [value]

for path in sorted(Path(sys.argv[1]).iterdir()):
    with ds.open(path, framework="np") as opened:
        arrays = dict(opened)
    loaded = [leaf for leaf in leaves(ds.load(path, framework="np")) if not isinstance(leaf, (int, str))]
    for found in (list(arrays.values()), loaded):
        assert {type(array) for array in found} == {np.ndarray}, path
        assert sorted(array.dtype.name for array in found) == sys.argv[2].split(), path
        assert sorted(float(array.astype("f8").sum()) for array in found) == eval(sys.argv[3]), path
    assert "torch" not in sys.modules, path
assert list(ds.open(sys.argv[4])) == ["w", "f"]
assert "torch" not in sys.modules
"""


def test_torch_is_not_imported_whatever_the_format(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    for name in CASES.keys() - SLOW:
        CASES[name].make(tmp_path / "made" / name)
    tensors = weights().values()
    types = " ".join(sorted(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
    sums = sorted(float(tensor.double().numpy().sum()) for tensor in tensors)
    # what only torch builds is passed over where it is only listed
    state = {"w": torch.ones(2), "size": torch.Size([2]), "device": torch.device("cpu"), "dtype": torch.bfloat16}
    torch.save(state | {"f": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / "w.pt")
    arguments = [tmp_path / "made", types, repr(sums), tmp_path / "w.pt"]
    subprocess.run([sys.executable, "-P", "-c", READ, *arguments], check=True, timeout=60)
