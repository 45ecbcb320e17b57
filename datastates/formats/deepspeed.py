"""A checkpoint of DeepSpeed with ZeRO: the parameters in fp32, put together from the flat partitions of all ranks.

The keys are the names of the module's parameters and buffers, as ``zero_to_fp32`` of DeepSpeed gives them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from datastates._base.files import length, read_bytes
from datastates.container.pickle_reader import Unbuilt
from datastates.errors import FormatError, StorageError
from datastates.formats.foreign import Foreign
from datastates.formats.foreign_file import ForeignFile, tensor
from datastates.formats.torch_file import TorchFile
from datastates.state import dtypes
from datastates.state.shards import Shard, StoredArray

NAME = "a checkpoint of DeepSpeed with ZeRO"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{2,9})_optim_states\.pt\Z")
_LATEST = "latest"
_MOST_TAG = 4096

Shapes = Mapping[str, tuple[int, ...]]
Place = tuple[TorchFile, StoredArray, Shard]
"""A file, an array in it, and the part of a parameter that lies in the array."""


def recognises(path: Path) -> bool:
    """Whether a folder has the optimizer's file of rank 0, or names a folder of that kind as its latest."""
    return path.is_dir() and _folder(path) is not None


def open(path: Path) -> Foreign:
    """Open the folder of a tag, or the one that ``latest`` names.

    Raises:
        FormatError: A file is damaged, or the checkpoint is of a kind that only DeepSpeed puts together; the message
            names the file.
        StorageError: A file is missing or cannot be read; the message names it.
    """
    folder = _folder(path)
    assert folder is not None
    try:
        return _open(folder)
    except FormatError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder} is no checkpoint of ZeRO: {type(error).__name__}: {error}") from error


def _folder(path: Path) -> Path | None:
    """The folder of a tag; None if there is none."""
    if any(match[1] == "0" for match in map(_OPTIMIZER.match, _names(path)) if match):
        return path
    if not (path / _LATEST).is_file():
        return None
    try:
        tag = read_bytes(path / _LATEST)(0, min(length(path / _LATEST), _MOST_TAG)).decode().strip()
    except UnicodeDecodeError:
        return None
    return _folder(path / tag) if tag and Path(tag).name == tag and tag != ".." and (path / tag).is_dir() else None


def _names(path: Path) -> list[str]:
    return [one.name for one in path.iterdir()]


def _open(folder: Path) -> Foreign:
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
    models = [TorchFile(folder / _model(stage, rank)) for rank in range(ranks if stage == 3 else 1)]
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


def _model(stage: int, rank: int) -> str:
    return f"{f'zero_pp_rank_{rank}_mp_rank_00' if stage == 3 else 'mp_rank_00'}_model_states.pt"


def _number(stage: Any) -> int:
    """The stage of ZeRO, which may be a member of an enumeration of DeepSpeed's."""
    return int(stage.arguments[0] if isinstance(stage, Unbuilt) else stage)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements ``begin`` to ``end - 1`` of a parameter, and where in a flat array the first of them would be."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    at: int


def _parameters(stage: int, groups: Sequence[Shapes], optimizers: Sequence[TorchFile]) -> Iterator[Place]:
    """The parts of the parameters in the flat partitions of all ranks."""
    flats = [_flats(stage, one) for one in optimizers]
    shapes = [[(name, tuple(shape)) for name, shape in group.items()] for group in groups]
    for name, shape in (item for group in shapes for item in group):
        if not prod(shape):  # no stretch holds any of it
            yield optimizers[0], flats[0][0], tensor(name, flats[0][0].dtype, (0,), of=shape, flat=(0, 0))
    if stage == 3:
        every = [item for group in shapes for item in group]
        for rank, file in enumerate(optimizers):
            yield from _cut(file, flats[rank], _each_split(every, rank, len(optimizers)))
        return
    for number, group in enumerate(shapes):
        partitions = [one[number] for one in flats]
        begin = 0
        for file, flat in zip(optimizers, partitions, strict=True):
            yield from _cut(file, [flat], [replace(one, at=one.at - begin) for one in _end_to_end(group)])
            begin += flat.shape[0]


def _flats(stage: int, file: TorchFile) -> list[StoredArray]:
    """The flat arrays of a rank, which are checked to be contiguous."""
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    found = list(file.value["optimizer_state_dict"][name])
    for one in found:
        _check_flat(file, one)
    return found


def _check_flat(file: TorchFile, array: Any) -> None:
    if not isinstance(array, StoredArray) or len(array.shape) != 1 or (array.shape[0] > 1 and array.stride != (1,)):
        raise FormatError(f"{file.path}: the partition of a parameter is no flat array")


def _end_to_end(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[_Stretch]:
    """ZeRO-1 and ZeRO-2 lay the parameters of a group end to end; a rank has a partition of the whole."""
    found, at = [], 0
    for name, shape in shapes:
        found.append(_Stretch(name, shape, 0, prod(shape), at))
        at += prod(shape)
    return found


def _each_split(shapes: Sequence[tuple[str, tuple[int, ...]]], rank: int, ranks: int) -> list[_Stretch]:
    """ZeRO-3 pads each parameter by itself, and cuts it into equal parts; those of a rank lie end to end."""
    found, at = [], 0
    for name, shape in shapes:
        numel = prod(shape)
        length = -(-numel // ranks)
        found.append(_Stretch(name, shape, min(rank * length, numel), min((rank + 1) * length, numel), at))
        at += length
    return found


def _cut(file: TorchFile, flats: Sequence[StoredArray], stretches: Sequence[_Stretch]) -> Iterator[Place]:
    """The parts of stretches that lie in some flat arrays, which lie end to end."""
    before = 0
    for flat in flats:
        for one in stretches:
            at = one.at - before
            low, high = max(at, 0), min(at + one.end - one.begin, flat.shape[0])
            if low < high:
                first = one.begin + low - at
                yield file, flat, _part(one.name, one.shape, flat, first, first + high - low, low)
        before += flat.shape[0]


def _part(name: str, shape: tuple[int, ...], flat: StoredArray, begin: int, end: int, at: int) -> Shard:
    """Elements ``begin`` to ``end - 1`` of a parameter, which begin at element ``at`` of a flat array."""
    offset = (flat.offset + at) * dtypes.BY_NAME[flat.dtype].itemsize
    return tensor(name, flat.dtype, (end - begin,), of=shape, flat=(begin, end), at=offset)


def _frozen(stage: int, models: Sequence[TorchFile]) -> Iterator[Place]:
    """The parameters that are not trained, of which ZeRO-3 has a part in the file of each rank."""
    shapes: Shapes = models[0].value.get("frozen_param_shapes") or {}
    for rank, file in enumerate(models if shapes else []):
        for name, shape in shapes.items():
            array = file.value["frozen_param_fragments"][name]
            if stage < 3:
                yield file, array, _whole(name, array)
                continue
            _check_flat(file, array)
            yield from _cut(
                file, [array], [replace(one, at=0) for one in _each_split([(name, tuple(shape))], rank, len(models))]
            )


def _whole(name: str, array: StoredArray) -> Shard:
    at = array.offset * dtypes.BY_NAME[array.dtype].itemsize
    return tensor(name, array.dtype, array.shape, array.stride, at=at)


def _shared(names: Mapping[str, str], places: Sequence[Place]) -> Iterator[Place]:
    """The parameters that are others under further names."""
    for name, other in names.items():
        for file, array, shard in places:
            if shard.key == other:
                yield file, array, replace(shard, key=name)


def _of_module(stage: int, file: TorchFile, known: Collection[str]) -> Iterator[Place]:
    """The buffers, and with ZeRO-1 and ZeRO-2 the parameters that are not trained: the module has them as they are."""
    buffers = set(file.value["buffer_names"])
    for name, array in file.value["module"].items():
        if name not in known and (stage < 3 or name in buffers) and isinstance(array, StoredArray):
            yield file, array, _whole(name, array)


def _file(file: TorchFile, places: Sequence[Place]) -> ForeignFile:
    """A file with the parts of parameters that lie in it."""
    parts = [(file.number(array), shard) for other, array, shard in places if other is file]
    return ForeignFile(file.path, file.nbytes, file.records, parts)
