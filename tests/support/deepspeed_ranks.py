"""How the tests start ranks of DeepSpeed on the CPU: arguments of the fixture ``ranks``."""

from __future__ import annotations

from typing import Any

# torch._dynamo and what it imports take longer than DeepSpeed; the first optimizer of a process asks for them
IMPORTED = ("deepspeed", "pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")
RANKS: dict[str, Any] = {
    "imported": IMPORTED,
    # the first run on a machine compiles DeepSpeed's operation for shared memory
    "timeout": 180,
    "DEEPSPEED_LOG_LEVEL": "warning",
    "DS_ACCELERATOR": "cpu",
    # DeepSpeed orders its parameter groups by a set of names; this makes the order equal on all ranks
    "PYTHONHASHSEED": "0",
}
