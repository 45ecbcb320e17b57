"""Reads checkpoints of DeepSpeed with ZeRO: puts parameters in fp32 together from the ranks' flat partitions.

The keys are the names of the module's parameters and buffers, as ``zero_to_fp32`` of DeepSpeed gives them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from datastates.container.unbuilt import Unbuilt
from datastates.errors import FormatError, StorageError
from datastates.formats.foreign import Foreign
from datastates.formats.foreign_file import ForeignFile, tensor, whole
from datastates.formats.seen import Seen
from datastates.formats.torch_file import TorchFile
from datastates.state import dtypes
from datastates.state.flat_layout import FlatLayout, Slice
from datastates.state.shards import Shard, StoredArray
from datastates.storage import store_of
from datastates.storage.location import Location

NAME = "a checkpoint of DeepSpeed with ZeRO"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{2,9})_optim_states\.pt\Z")
_LATEST = "latest"
_MOST_TAG = 4096

Shapes = Mapping[str, tuple[int, ...]]
Place = tuple[TorchFile, StoredArray, Shard]
"""A file, an array in it, and the part of a parameter that lies in the array."""


def recognises(seen: Seen) -> bool:
    """Whether a folder has the optimizer's file of rank 0, or its file ``latest`` names a folder that has one."""
    return _folder(seen) is not None


def open(path: Location) -> Foreign:
    """Open the folder of a tag, or the folder that the file ``latest`` names.

    Raises:
        FormatError: A file is damaged, or the checkpoint is of a kind that only DeepSpeed puts together; the message
            names the file.
        StorageError: A file is missing or cannot be read; the message names it.
    """
    folder = _folder(Seen(path))
    assert folder is not None
    try:
        return _open(folder)
    except FormatError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder} is no checkpoint of ZeRO: {type(error).__name__}: {error}") from error


def _folder(seen: Seen) -> Location | None:
    """The path if it is the folder of a tag, else the folder that its file ``latest`` names; None without one."""
    if any(match[1] == "0" for match in map(_OPTIMIZER.match, seen.names) if match):
        return seen.path
    if not seen.has(_LATEST):
        return None
    try:
        tag = store_of(seen.path).head(seen.path / _LATEST, _MOST_TAG).decode().strip()
    except UnicodeDecodeError:
        return None
    is_name = tag and Location(tag).name == tag and tag != ".."
    return _folder(Seen(seen.path / tag)) if is_name else None


def _names(path: Location) -> list[str]:
    return store_of(path).names(path)


def _open(folder: Location) -> Foreign:
    found = {name: match for name in sorted(_names(folder)) if (match := _OPTIMIZER.match(name))}
    if any(int(match[2]) for match in found.values()):
        raise FormatError(f"{folder} is of a model-parallel engine, whose parameters only DeepSpeed puts together")
    by_rank = {int(match[1]): name for name, match in found.items()}
    if len(by_rank) < len(found):
        raise FormatError(f"{folder} has two optimizer files of one rank")
    first = TorchFile(folder / by_rank[0])
    zero = first.value["optimizer_state_dict"]
    stage, counts = _number(zero["zero_stage"]), zero["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else counts
    if isinstance(counts, list) and len(set(counts)) > 1:
        raise FormatError(f"{folder} is of a model with experts, whose parameters only DeepSpeed puts together")
    if any(padding for group in zero.get("param_alignment_paddings") or [] for padding in group):
        raise FormatError(f"{folder} is of an engine with zero_optimization.parameter_alignment, which is not read")
    if type(ranks) is not int or ranks < 1:
        raise FormatError(f"{folder} does not say how many ranks it is of")
    lost = sorted(set(range(min(ranks, len(by_rank) + 1))) - by_rank.keys())
    if lost or len(by_rank) != ranks:
        name = re.sub("rank_0_", f"rank_{lost[0] if lost else max(by_rank)}_", by_rank[0], count=1)
        what = f"{folder} is of {ranks} ranks: {name} is {'missing' if lost else 'of another checkpoint'}"
        raise StorageError(errno.ENOENT, "open", str(folder / name), what)
    optimizers = [first, *(TorchFile(folder / by_rank[rank]) for rank in range(1, ranks))]
    models = [TorchFile(folder / model_file(stage, rank)) for rank in range(ranks if stage == 3 else 1)]
    model = models[0].value
    if not isinstance(model["module"], dict):
        raise FormatError(f"{folder} is of a pipeline, whose parameters only DeepSpeed puts together")
    places = [*_parameters(stage, model["param_shapes"], optimizers), *_frozen(stage, models)]
    held = {shard.key for _, _, shard in places}
    if lost_names := [name for group in model["param_shapes"] for name in group if name not in held]:
        raise FormatError(f"{folder}: no rank has any element of {lost_names[0]!r}")
    places += _shared(model["shared_params"], places)
    places += _of_module(stage, models[0], {shard.key for _, _, shard in places})
    step = model.get("global_steps")
    files = [_file(one, places) for one in (*models, *optimizers)]
    return Foreign(NAME, folder, files, step if type(step) is int else None)


def model_file(stage: int, rank: int) -> str:
    """Name of the file with a rank's module. With ZeRO-1 and ZeRO-2, one file serves all ranks."""
    return f"{f'zero_pp_rank_{rank}_mp_rank_00' if stage == 3 else 'mp_rank_00'}_model_states.pt"


def _number(stage: Any) -> int:
    """The stage of ZeRO as an int; ``stage`` may be a member of an enumeration of DeepSpeed's."""
    return int(stage.arguments[0] if isinstance(stage, Unbuilt) else stage)


def _parameters(stage: int, groups: Sequence[Shapes], optimizers: Sequence[TorchFile]) -> Iterator[Place]:
    """The parts of the parameters in the flat partitions of all ranks."""
    flats = [_flats(stage, one) for one in optimizers]
    shapes = [[(name, tuple(shape)) for name, shape in group.items()] for group in groups]
    for name, shape in (item for group in shapes for item in group):
        if not prod(shape):  # no flat array holds any of it
            yield optimizers[0], flats[0][0], tensor(name, flats[0][0].dtype, (0,), of=shape, flat=(0, 0))
    if stage == 3:
        every = [item for group in shapes for item in group]
        for rank, file in enumerate(optimizers):
            yield from _cut(file, flats[rank], FlatLayout.each_split(every, rank, len(optimizers)).slices)
        return
    for number, group in enumerate(shapes):
        slices, begin = FlatLayout.concatenated(group, 0, 1).slices, 0
        for file, partitions in zip(optimizers, flats, strict=True):
            yield from _cut(file, [partitions[number]], slices, begin)
            begin += partitions[number].shape[0]


def _flats(stage: int, file: TorchFile) -> list[StoredArray]:
    """The flat arrays of parameters in the optimizer file of a rank, checked to be contiguous."""
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    found = list(file.value["optimizer_state_dict"][name])
    for one in found:
        _check_flat(file, one)
    return found


def _check_flat(file: TorchFile, array: Any) -> None:
    if not isinstance(array, StoredArray) or len(array.shape) != 1 or (array.shape[0] > 1 and array.stride != (1,)):
        raise FormatError(f"{file.path}: the partition of a parameter is no flat array")


def _cut(file: TorchFile, flats: Sequence[StoredArray], slices: Sequence[Slice], begin: int = 0) -> Iterator[Place]:
    """The parts of parameters in flat arrays, which lie end to end in the partition from element ``begin`` on."""
    for flat in flats:
        for piece in slices:
            at = piece.at - begin
            low, high = max(at, 0), min(at + piece.end - piece.begin, flat.shape[0])
            if low < high:
                held = piece.begin + low - at, piece.begin + high - at
                offset = (flat.offset + low) * dtypes.BY_NAME[flat.dtype].itemsize
                name = str(piece.name)
                yield file, flat, tensor(name, flat.dtype, (high - low,), of=piece.shape, flat=held, at=offset)
        begin += flat.shape[0]


def _frozen(stage: int, models: Sequence[TorchFile]) -> Iterator[Place]:
    """The parts of parameters that are not trained: ZeRO-3 stores a part of each in the file of each rank."""
    shapes: Shapes = models[0].value.get("frozen_param_shapes") or {}
    for rank, file in enumerate(models if shapes else []):
        for name, shape in shapes.items():
            array = file.value["frozen_param_fragments"][name]
            if stage < 3:
                yield file, array, whole(name, array)
                continue
            _check_flat(file, array)
            layout = FlatLayout.each_split([(name, shape)], rank, len(models))
            yield from _cut(file, [array], layout.slices)


def _shared(names: Mapping[str, str], places: Sequence[Place]) -> Iterator[Place]:
    """The parameters that share the memory of another one, under their further names."""
    for name, other in names.items():
        for file, array, shard in places:
            if shard.key == other:
                yield file, array, replace(shard, key=name)


def _of_module(stage: int, file: TorchFile, known: Collection[str]) -> Iterator[Place]:
    """The tensors that the module's file holds whole: buffers, with ZeRO-1 and ZeRO-2 also parameters not trained."""
    buffers = set(file.value["buffer_names"])
    for name, array in file.value["module"].items():
        if name not in known and (stage < 3 or name in buffers) and isinstance(array, StoredArray):
            yield file, array, whole(name, array)


def _file(file: TorchFile, places: Sequence[Place]) -> ForeignFile:
    """Make a checkpoint file of an opened file, with the parts of parameters in it."""
    parts = [(file.number(array), shard) for other, array, shard in places if other is file]
    return ForeignFile(file.path, file.nbytes, file.records, parts)
