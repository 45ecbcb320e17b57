"""Ways to turn a checkpoint into weights for other tools: each saves weights, and later exports what it has saved.

What an export needs is imported before it is measured. Systems that do not sync get an fsync within the time.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from measure import cores
from peers.base import fsync_tree

Weights = dict[str, torch.Tensor]
Export = Callable[[Path, Path], object]
"""Exports a source to a target that does not exist, until it is on stable storage."""
WINDOW = 16 << 20
"""Bytes that a raw copy reads and writes at a time: those of an export of fp32 without a cast."""
ZERO_RANKS = 2


@dataclass(frozen=True)
class Exporter:
    """One way to export.

    Attributes:
        settings: Its settings in one line.
        source: Which of ``SOURCES`` it reads.
        prepare: Imports what it needs, and returns the function that exports.
        target: The name of what it makes.
    """

    settings: str
    source: str
    prepare: Callable[[], Export]
    target: str = "out"


# --- sources


def _save_own(weights: Weights, path: Path) -> None:
    import datastates as ds
    from datastates.providers import from_state_dict

    ds.snapshot([from_state_dict("model", dict(weights))], path).wait_committed()


def _save_dcp(weights: Weights, path: Path) -> None:
    save(dict(weights), storage_writer=FileSystemWriter(path, thread_count=cores()), no_dist=True)


def _save_dcp_safetensors(weights: Weights, path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    with _one_rank():
        save(_sharded(weights), storage_writer=writer)


def _save_torch_checkpointing(weights: Weights, path: Path) -> None:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    config = CheckpointManager.Config(
        items={"model": ItemSpec(layout=layout, resharder=DefaultResharder())},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    with _one_rank(), contextlib.closing(CheckpointManager(config)) as manager:
        manager.save(str(path), {"model": _sharded(weights)})


def _save_deepspeed(weights: Weights, path: Path) -> None:
    """Files of ZeRO-2 that hold only what an export reads: neither 16-bit weights nor moments."""
    tag = path / "global_step1"
    tag.mkdir(parents=True)
    (path / "latest").write_text(tag.name)
    shapes = OrderedDict((name, tensor.shape) for name, tensor in weights.items())
    model = {"module": {}, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}, "ds_version": "0.17.0"}
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    each = sum(tensor.numel() for tensor in weights.values()) // ZERO_RANKS
    for rank in range(ZERO_RANKS):
        part, at = torch.empty(each), -rank * each  # all weights end to end are cut into parts, wherever that is
        for tensor in weights.values():
            begin, end = max(at, 0), min(at + tensor.numel(), each)
            if begin < end:
                part[begin:end] = tensor.flatten()[begin - at : end - at]
            at += tensor.numel()
        optimizer = {"zero_stage": 2, "partition_count": ZERO_RANKS, "single_partition_of_fp32_groups": [part]}
        torch.save({"optimizer_state_dict": optimizer}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


SOURCES: dict[str, Callable[[Weights, Path], None]] = {
    "own": _save_own,
    "dcp": _save_dcp,
    "dcp-safetensors": _save_dcp_safetensors,
    "torch-checkpointing": _save_torch_checkpointing,
    "deepspeed": _save_deepspeed,
}


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded(weights: Weights) -> Weights:
    mesh = init_device_mesh("cpu", (1,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in weights.items()}


# --- exports


def _ours() -> Export:
    import datastates as ds

    return ds.export


def _raw() -> Export:
    def copy(source: Path, target: Path) -> None:
        target.mkdir()
        buffers = deque(mmap.mmap(-1, WINDOW) for _ in range(3))
        with ThreadPoolExecutor(1) as writer:
            for file in sorted(source.iterdir()):
                _copy(file, target / file.name, buffers, writer)
        fsync_tree(target)

    return copy


def _copy(source: Path, target: Path, buffers: deque[mmap.mmap], writer: ThreadPoolExecutor) -> None:
    """Copy a file past the page cache: one window is read while the one before it is written."""
    nbytes, written = source.stat().st_size, deque[Future[int]]()
    reading, writing = (
        os.open(source, os.O_RDONLY | os.O_DIRECT),
        os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT),
    )
    try:
        for at in range(0, nbytes, WINDOW):
            if len(written) == len(buffers):
                written.popleft().result()
            buffer = buffers[0]
            buffers.rotate(-1)
            count = os.preadv(reading, [buffer], at)
            assert count == min(WINDOW, nbytes - at)
            pages = memoryview(buffer)[: -(-count // mmap.PAGESIZE) * mmap.PAGESIZE]
            written.append(writer.submit(os.pwrite, writing, pages, at))
        for one in written:
            one.result()
        os.ftruncate(writing, nbytes)
    finally:
        os.close(reading)
        os.close(writing)


def _dcp_safetensors() -> Export:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    def export(source: Path, target: Path) -> None:
        target.mkdir()
        names = sorted(HuggingFaceStorageReader(str(source)).read_metadata().state_dict_metadata)
        files = {name: 1 + i * cores() // len(names) for i, name in enumerate(names)}
        consolidate_safetensors_files(str(source), str(target), files, num_threads=cores())
        fsync_tree(target)

    return export


def _dcp_to_torch() -> Export:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def export(source: Path, target: Path) -> None:
        dcp_to_torch_save(source, target)
        fsync_tree(target)

    return export


def _torch_checkpointing() -> Export:
    from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def export(source: Path, target: Path) -> None:
        consolidate_hf_safetensors_checkpoint(
            str(source), output_dir=str(target), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
        )
        fsync_tree(target)

    return export


def _zero_to_fp32() -> Export:
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    logging.disable(logging.WARNING)

    def export(source: Path, target: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            convert_zero_checkpoint_to_fp32_state_dict(str(source), str(target), safe_serialization=True)
        fsync_tree(target)

    return export


_IN_OURS = "export() to a folder of safetensors, defaults; every tensor compared with its checksum"
EXPORTERS: dict[str, Exporter] = {
    "raw": Exporter(
        "the files of datastates copied with O_DIRECT, windows of 16 MiB read while others are written", "own", _raw
    ),
    "datastates": Exporter(_IN_OURS, "own", _ours),
    "datastates to a torch file": Exporter("export() to one file for torch.load, defaults", "own", _ours, "out.pt"),
    "datastates from DCP": Exporter(_IN_OURS, "dcp", _ours),
    "datastates from DeepSpeed": Exporter(f"{_IN_OURS} where one has its own", "deepspeed", _ours),
    "DCP": Exporter(
        "consolidate_safetensors_files of what HuggingFaceStorageWriter(save_distributed=True) saved, a thread and a "
        "file for each core, then fsync",
        "dcp-safetensors",
        _dcp_safetensors,
    ),
    "dcp_to_torch_save": Exporter("of DCP's FileSystemWriter, then fsync", "dcp", _dcp_to_torch, "out.pt"),
    "torch_checkpointing": Exporter(
        "consolidate_hf_safetensors_checkpoint, use_direct_io=False, then fsync",
        "torch-checkpointing",
        _torch_checkpointing,
    ),
    "zero_to_fp32": Exporter(
        f"convert_zero_checkpoint_to_fp32_state_dict(safe_serialization=True) of ZeRO-2's files of {ZERO_RANKS} ranks, "
        "without the 16-bit weights, which it would read as well, then fsync",
        "deepspeed",
        _zero_to_fp32,
    ),
}
