"""The accelerators of torch, CuPy and JAX, which are CUDA devices: their numbers, streams, memory and random states.

All arrays of a process that are not in host memory lie on one kind of accelerator, so a number names a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from datastates._base import log
from datastates._base.columns import I32, U64
from datastates._base.loaded import loaded
from datastates.state.shards import HOST


def is_accelerator(device: Any) -> bool:
    """Whether a ``torch.device`` is an accelerator whose memory can be read and written; also False for None."""
    return getattr(device, "type", None) == "cuda"


def holds(tensor: Any) -> bool:
    """Whether a torch tensor lies on such an accelerator."""
    return bool(tensor.is_cuda)


def number(kind: str, array: Any) -> int:
    """Device number of an array of ``"torch"`` or ``"cupy"`` on an accelerator."""
    return int(array.device.index if kind == "torch" else array.device.id)


def number_in_jax(device: Any) -> int | None:
    """Device number of one of this process's devices of JAX; None if its memory is not read at its address."""
    is_cuda = device.platform != "cpu" and "cuda" in device.client.platform_version.lower()
    return int(device.local_hardware_id) if is_cuda else None


def number_in_dlpack(kind: int, index: int) -> int | None:
    """Device number of a device as DLPack writes it; :data:`HOST` for host memory, None for an unknown kind."""
    return {1: HOST, 2: index}.get(kind)  # kDLCPU and kDLCUDA


def chosen(device: Any) -> Any | None:
    """Turn the device that the user gave into a ``torch.device`` with a number; None for host memory.

    Args:
        device: The device. ``"cuda"`` means torch's current CUDA device.

    Raises:
        TypeError, ValueError: ``device`` is no device, or neither host memory nor a CUDA device of this process.
        ImportError: ``device`` is not ``"cpu"``, and torch is not installed.
    """
    if isinstance(device, str) and device == "cpu":
        return None
    import torch

    if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
        raise TypeError(f"device: {device!r:.80} is no device")
    try:
        meant = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r:.80} is no device") from error
    if meant.type == "cpu":
        return None
    if not is_accelerator(meant):
        raise ValueError(f"device: {device!r:.80} is neither the CPU nor a CUDA device")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (meant.index or 0) >= count:
        raise ValueError(f"device: {device!r:.80} does not exist: torch finds {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if meant.index is None else meant.index)


def current_device() -> int | None:
    """The number of torch's current CUDA device; None if torch has not initialized CUDA."""
    torch: Any = loaded("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else None


def current_stream(kind: str, device: int) -> int:
    """Handle of the stream on which a library (``"torch"`` or ``"cupy"``) now enqueues work; 0 for host memory.

    It is 0 for JAX, too: JAX does not tell its streams, and its arrays are described only once they are computed.
    """
    if device == HOST or kind == "jax":
        return 0
    if kind == "torch":
        torch: Any = loaded("torch")
        return int(torch.cuda.current_stream(device).cuda_stream)
    cupy: Any = loaded("cupy")
    with cupy.cuda.Device(device):
        return int(cupy.cuda.get_current_stream().ptr)


def streams(devices: I32) -> U64:
    """For each device number, the handle of the stream on which torch now enqueues work; 0 for host memory."""
    result = np.zeros(len(devices), np.uint64)
    for device in set(devices.tolist()):
        result[devices == device] = current_stream("torch", device)
    return result


def consumer_streams(devices: Sequence[int]) -> list[tuple[int, int]]:
    """Each pair (device number, stream handle) on which torch and CuPy, if imported, would now enqueue an update."""
    torch: Any = loaded("torch")
    kinds = [*(["torch"] if torch and torch.cuda.is_initialized() else []), *(["cupy"] if loaded("cupy") else [])]
    return sorted({(d, current_stream(kind, d)) for kind in kinds for d in devices})


def side_streams(devices: set[Any]) -> list[Any]:
    """Make a stream for each accelerator among some ``torch.device``, and for torch's current device if CUDA is in use.

    A stream waits for the work that its device's current stream has so far.
    """
    torch: Any = loaded("torch")
    made = []
    for device in {device.index for device in devices if is_accelerator(device)} | {current_device()} - {None}:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        made.append(stream)
    return made


@contextlib.contextmanager
def enqueueing_on(side: Sequence[Any]) -> Iterator[None]:
    """A context in which torch enqueues this thread's work on streams of :func:`side_streams`."""
    torch: Any = loaded("torch")
    with contextlib.ExitStack() as stack:
        for stream in side:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def free_memory(device: Any) -> int:
    """Bytes of a CUDA device that torch can still allocate: free ones, and those that torch keeps for reuse."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def rng_states() -> dict[str, Any]:
    """The states of torch's random generators on all devices, by the kind of device; empty if CUDA is not in use."""
    torch: Any = loaded("torch")
    in_use = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"cuda": torch.cuda.get_rng_state_all()} if in_use else {}


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Set states of :func:`rng_states` by device number. Devices that are not here are skipped; a warning is logged."""
    import torch

    stored = states.get("cuda", [])
    present = torch.cuda.device_count() if stored else 0
    if present < len(stored):
        log.warning("random states of %d GPUs were saved, %d are here", len(stored), present)
    for device, generator in enumerate(stored[:present]):
        torch.cuda.set_rng_state(generator, device)
