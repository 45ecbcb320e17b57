"""Opens a DeepSpeed checkpoint folder with ZeRO: the state of its ranks, described by logical parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datastates._base.cached import cached_property
from datastates.config import IoSettings
from datastates.container.file import Container
from datastates.container.table import Row
from datastates.errors import CheckpointNotFoundError, FormatError, RestoreError
from datastates.executor.make import make_executor
from datastates.formats.deepspeed import model_file
from datastates.formats.zero_files import Arrays, Flat, Section, StateFile, ZeroFiles
from datastates.restoring.meeting import Meeting
from datastates.restoring.request import RestoreRequest
from datastates.restoring.restore import Restore
from datastates.restoring.restored import Restored
from datastates.state.flat_layout import Name
from datastates.state.provider import StateProvider
from datastates.state.shards import ArrayRef
from datastates.storage import Location, store_of

OPTIMIZER, FROZEN = "optimizer", "frozen"
"""Names of providers: the optimizer's state with the master weights, and the frozen parameters."""
MASTER, FRAGMENT = "fp32", "fragment"
"""Names of states: the master weights, and a frozen parameter itself."""
GLOBALS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Values of DeepSpeed's optimizer that are the same on all ranks."""


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The contents of one rank's optimizer file: for each flat tensor, its arrays and its other states."""

    container: Container
    arrays: Arrays
    plain: list[dict[str, object]]


class SavedZero:
    """A checkpoint that a DeepSpeed engine with ZeRO-1, ZeRO-2 or ZeRO-3 saved with this package.

    Attributes:
        path: Its folder.
        stage: 1, 2 or 3.
        ranks: The number of ranks that saved it.
        globals: The values named in :data:`GLOBALS`, as far as it has them.
    """

    def __init__(self, path: Location) -> None:
        """Open the files of rank 0. Files of other ranks are opened when they are needed.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            FormatError: A file is damaged, or another program wrote it.
            RestoreError: Such a checkpoint cannot be loaded on another number of ranks.
            StorageError: A file cannot be read.
        """
        self.path = path
        self._prefix = self._find_prefix()
        self._attempt: object = None
        self._held: dict[int, _RankFile] = {}
        optimizer = self._open(self.optimizer_path(0))
        zero = optimizer.value.get("optimizer_state_dict")
        if not isinstance(zero, dict) or "zero_stage" not in zero:
            raise RestoreError(f"{self.optimizer_path(0)} holds no state of a ZeRO optimizer")
        self.stage = int(zero["zero_stage"])
        self._model = self._open(self.model_path(0))
        model = self._model.structure
        self.ranks = int(model["dp_world_size"])
        self._refuse(model, zero)
        self.globals = {key: zero[key] for key in GLOBALS if key in zero and not isinstance(zero[key], ArrayRef)}
        self._shapes = [_shapes(group) for group in model["param_shapes"]]
        self._groups = self._base(zero)["param_groups"]
        self._held[0] = self._read(optimizer)
        self._check_shapes()
        self._partitions = [None if self.stage == 3 else self._partition(zero, i) for i in range(len(self._shapes))]

    def _find_prefix(self) -> str:
        for prefix in ("bf16_", ""):
            path = self.path / f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"
            if store_of(path).exists(path):
                return prefix
        raise CheckpointNotFoundError(f"{self.path} holds no checkpoint of a DeepSpeed engine with ZeRO")

    def optimizer_path(self, rank: int) -> Location:
        """The file with a rank's optimizer state."""
        return self.path / f"{self._prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_path(self, rank: int) -> Location:
        """The file with a rank's module; with ZeRO-1 and ZeRO-2, one file for all ranks."""
        return self.path / model_file(self.stage, rank)

    def _open(self, path: Location) -> StateFile:
        opened = StateFile(path)
        if self._attempt not in (None, opened.attempt):
            raise FormatError(f"{path} was not saved together with {self.optimizer_path(0)}")
        self._attempt = opened.attempt
        return opened

    def _refuse(self, model: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
        counts = zero["partition_count"]
        counts = counts if isinstance(counts, list) else [counts]
        paddings = [padding for group in zero.get("param_alignment_paddings") or [] for padding in group]
        for wrong, what in (
            (not isinstance(model.get("module"), dict), "a pipeline"),
            (model.get("mp_world_size", 1) != 1, "a model-parallel engine"),
            (any(count != self.ranks for count in counts) or "num_experts" in model, "a model with experts"),
            (any(paddings), "an engine with zero_optimization.parameter_alignment"),
            (not isinstance(self._base(zero), dict), "an engine with zero_optimization.elastic_checkpoint"),
        ):
            if wrong:
                raise RestoreError(f"{self.path} is of {what}, which cannot be loaded on another number of ranks")

    def _base(self, zero: Mapping[str, Any]) -> Any:
        return zero["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]

    def _check_shapes(self) -> None:
        numbers = [i for group in self._groups for i in group["params"]]
        if not len(self._shapes) == len(self._held[0].arrays) == len(numbers) or numbers != sorted(numbers):
            raise FormatError(f"{self.optimizer_path(0)}: its groups are not those of {self.model_path(0)}")

    def _partition(self, zero: Mapping[str, Any], i: int) -> int:
        """Elements of each rank's partition of group ``i``, with padding. Rank 0 has padding only if it is alone."""
        saved = self._held[0].arrays[i][MASTER].shape[0]
        return max(saved + (int(zero["group_paddings"][i]) if self.ranks == 1 else 0), 1)

    def _read(self, file: StateFile) -> _RankFile:
        zero = file.value["optimizer_state_dict"]
        base = self._base(zero)
        arrays: list[dict[str, Row]] = []
        plain: list[dict[str, object]] = []
        masters = zero["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]
        for i, master in enumerate(masters):
            states = base["state"].get(i, {})
            refs = {MASTER: master, **{k: v for k, v in states.items() if isinstance(v, ArrayRef)}}
            arrays.append({state: file.row(ref) for state, ref in refs.items()})
            plain.append({state: value for state, value in states.items() if state not in refs})
        for state, row in ((s, r) for found in arrays for s, r in found.items()):
            if len(row.shape) > 1:
                raise RestoreError(f"{file.container.path}: {state!r} of shape {row.shape} is not cut up over ranks")
        return _RankFile(file.container, arrays, plain)

    def _of_rank(self, rank: int) -> _RankFile:
        if rank not in self._held:
            self._held[rank] = self._read(self._open(self.optimizer_path(rank)))
        return self._held[rank]

    # --- its contents

    @property
    def module(self) -> Mapping[str, Any]:
        """The module's state dict, with an ArrayRef for each array; with ZeRO-3, rank 0's."""
        module: Mapping[str, Any] = self._model.structure["module"]
        return module

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the module; None if the name is of something else."""
        found = self.module.get(name)
        return found.shape if isinstance(found, ArrayRef) else None

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of the module's buffers."""
        return frozenset(self._model.structure["buffer_names"])

    @cached_property
    def _optimizer(self) -> Section:
        flats = [
            Flat(shapes, self.ranks, partition, states)
            for shapes, partition, states in zip(self._shapes, self._partitions, self._held[0].arrays, strict=True)
        ]
        groups = []
        for group in self._groups:
            if tensors := [key for key, value in group.items() if isinstance(value, ArrayRef)]:
                raise RestoreError(f"{self.optimizer_path(0)}: {tensors[0]!r} of a parameter group is a tensor")
            names = [name for i in group["params"] for name, _ in self._shapes[i]]
            groups.append({**group, "params": names})

        def open_rank(rank: int) -> tuple[Container, Arrays]:
            held = self._of_rank(rank)
            return held.container, held.arrays

        return Section(OPTIMIZER, flats, groups, open_rank)

    @cached_property
    def _frozen(self) -> Section | None:
        shapes = self._model.structure["frozen_param_shapes"]
        if self.stage < 3 or shapes is None:
            return None  # with ZeRO-1 and ZeRO-2 the module has them
        parameters = _shapes(shapes)
        first = self._fragments(self._model)
        flats = [Flat((p,), self.ranks, None, found) for p, found in zip(parameters, first, strict=True)]

        def open_rank(rank: int) -> tuple[Container, Arrays]:
            file = self._open(self.model_path(rank))
            return file.container, self._fragments(file)

        return Section(FROZEN, flats, [{"params": [name for name, _ in parameters]}], open_rank)

    @staticmethod
    def _fragments(file: StateFile) -> Arrays:
        return [{FRAGMENT: file.row(ref)} for ref in file.structure["frozen_param_fragments"].values()]

    @property
    def has_frozen(self) -> bool:
        """Whether the checkpoint holds fragments of frozen parameters."""
        return self._frozen is not None

    def stored(self) -> ZeroFiles:
        """The checkpoint as logical tensors, for the providers :data:`OPTIMIZER` and, if needed, :data:`FROZEN`."""
        sections = [self._optimizer] if self._frozen is None else [self._optimizer, self._frozen]
        return ZeroFiles(self.path, self.ranks, sections)

    def restore(
        self, meeting: Meeting, settings: IoSettings, described: Callable[[], Sequence[StateProvider]]
    ) -> Restored:
        """Restore providers, on all ranks together. Every class is trusted.

        Args:
            meeting: The ranks.
            settings: The settings for reading.
            described: Makes the providers; all ranks go on, or none.

        Raises:
            CorruptError: Contents do not match their checksum; the message names them. The state is spoilt then.
            RestoreError: The checkpoint does not fit the providers. Nothing has been changed.
        """
        stored, providers = meeting.together("describe", lambda: (self.stored(), described()))
        request = RestoreRequest(trust="all")
        return Restore(stored, providers, lambda nbytes: make_executor(settings, nbytes), meeting, request).run()

    def plain(self, name: Name) -> Mapping[str, object]:
        """The states of a parameter that are no arrays, from the rank that had its first element."""
        for i, flat in enumerate(self._optimizer.flats):
            shape = dict(flat.parameters).get(name)
            if shape is not None and self._held[0].plain[i]:
                return self._of_rank(flat.holders(name, shape, 0, 1)[0]).plain[i]
        return {}


def _shapes(named: Mapping[str, Any]) -> tuple[tuple[Name, tuple[int, ...]], ...]:
    return tuple((name, tuple(shape)) for name, shape in named.items())
