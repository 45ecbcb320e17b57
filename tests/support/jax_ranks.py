"""How the tests start processes of JAX, and what they hear from them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RANKS: dict[str, Any] = {
    "imported": ("jax", "msgpack", "numpy", "pydantic"),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}
"""Arguments of the fixture ``ranks``."""
IMPORTS = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1] / "distributed"), str(Path(__file__).parent)]!r}
from jax_process import *
"""
HEAD = f"""{IMPORTS}
client = start()
"""
"""The begin of a script."""

Reports = list[dict[str, dict[str, Any]]]


def reports(done: Iterable[subprocess.CompletedProcess[str]]) -> Reports:
    """What each process has reported, by word. gloo prints lines of its own."""
    lines = (re.findall(r"^\{.*$", d.stdout, re.MULTILINE) for d in done)
    return [{said["word"]: said for said in map(json.loads, each)} for each in lines]
