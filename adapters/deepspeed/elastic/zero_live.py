"""The state that a DeepSpeed engine with ZeRO holds on this rank, described by logical parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datastates.errors import RestoreError
from datastates.formats import zero_saved
from datastates.providers import FlatLayout, Partition, ShardedZeroProvider

_STAGES = {"DeepSpeedZeroOptimizer": (1, 2), "DeepSpeedZeroOptimizer_Stage3": (3,)}


class LiveZero:
    """The ZeRO optimizer of one DeepSpeed engine.

    Attributes:
        stage: 1, 2 or 3.
        rank: This rank's number among the ranks that share the optimizer's state.
        ranks: The number of ranks that share it.
        shares: The flat partitions that the optimizer steps.
    """

    def __init__(self, engine: Any) -> None:
        """Describe the optimizer; nothing is copied.

        Raises:
            RestoreError: Checkpoints of such an engine cannot be loaded on another number of ranks.
        """
        from deepspeed import comm

        _refuse(engine)
        self.stage = int(engine.zero_optimization_stage())
        self._engine = engine
        self._optimizer = engine.optimizer
        group = self._optimizer.dp_process_group
        self.rank, self.ranks = comm.get_rank(group=group), comm.get_world_size(group=group)
        if self.ranks != comm.get_world_size():
            raise RestoreError(f"{self.ranks} of {comm.get_world_size()} ranks share the optimizer's state, not all")
        self.shares = list(self._whole_groups() if self.stage < 3 else self._sub_groups())

    def _name(self, parameter: Any) -> str:
        name: str = self._engine.param_names[parameter]
        return name

    def _whole_groups(self) -> Iterator[Partition]:
        optimizer = self._optimizer
        if any(any(paddings) for paddings in getattr(optimizer, "round_robin_bit16_padding", ())):
            raise RestoreError("zero_optimization.parameter_alignment is set: not on another number of ranks")
        # the order of the flat buffer: with round_robin_gradients, parameter groups have another
        groups = zip(optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
        for i, (parameters, flat) in enumerate(groups):
            named = [(self._name(p), tuple(p.shape)) for p in parameters]
            layout = FlatLayout.concatenated(named, self.rank, self.ranks, alignment=flat.numel())
            yield _partition(layout, flat, i)

    def _sub_groups(self) -> Iterator[Partition]:
        optimizer = self._optimizer
        groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
        for i, (parameters, flat) in enumerate(groups):
            named = [(self._name(p), tuple(p.ds_shape)) for p in parameters]
            layout = FlatLayout.each_split(named, self.rank, self.ranks)
            yield _partition(layout, flat, optimizer.sub_group_to_group_id[i])

    def provider(self) -> ShardedZeroProvider:
        """The provider of the master weights and the optimizer's state."""
        return ShardedZeroProvider(zero_saved.OPTIMIZER, self.shares, optimizer=self._optimizer.optimizer)

    def frozen(self) -> dict[str, Any]:
        """With ZeRO-3, this rank's fragments of frozen parameters, by name."""
        trained = {name for share in self.shares for name in share.names}
        named = ((self._name(p), p) for p in self._engine.module.parameters() if hasattr(p, "ds_id"))
        return {name: p.ds_tensor.detach() for name, p in named if name not in trained}

    def frozen_provider(self) -> ShardedZeroProvider:
        """The provider of this rank's fragments of frozen parameters."""
        shapes = {self._name(p): tuple(p.ds_shape) for p in self._engine.module.parameters()}
        shares = [
            Partition(
                FlatLayout.each_split([(name, shapes[name])], self.rank, self.ranks), {zero_saved.FRAGMENT: fragment}
            )
            for name, fragment in self.frozen().items()
        ]
        return ShardedZeroProvider(zero_saved.FROZEN, shares)

    def put(self, share: Partition, plain: Any) -> None:
        """Put states that are no arrays into a partition's optimizer state."""
        if plain:
            self._optimizer.optimizer.state[share.parameter].update(plain)

    def state(self) -> dict[str, Any]:
        """The state dict that DeepSpeed would save; its tensors are the live ones."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state


def _partition(layout: FlatLayout, flat: Any, group: int) -> Partition:
    if layout.numel != flat.numel():
        raise RestoreError(
            f"the flat partition of {layout.parameters[0][0]!r} and others has {flat.numel()} elements where "
            f"{layout.numel} are expected: this version of DeepSpeed has another layout"
        )
    return Partition(layout, {zero_saved.MASTER: flat}, parameter=flat, group=group)


def _refuse(engine: Any) -> None:
    from deepspeed.runtime.pipe.module import PipelineModule

    zero = engine._config.zero_config
    kind, stage = type(engine.optimizer).__name__, int(engine.zero_optimization_stage())
    for wrong, what in (
        (stage not in _STAGES.get(kind, ()), f"ZeRO stage {stage} with a {kind}"),
        (isinstance(engine.module, PipelineModule), "the model is a pipeline"),
        (engine.mp_world_size != 1, "the engine is model-parallel"),
        (engine.has_moe_layers, "the model has experts"),
        (engine.zero_nvme_offload_optimizer() or _on_nvme(zero.offload_param), "state is offloaded to NVMe"),
        (engine.zero_partial_offload() not in (None, 1.0), "the optimizer is offloaded in part"),
        (zero.elastic_checkpoint, "zero_optimization.elastic_checkpoint is set"),
        (engine.load_universal_checkpoint(), "checkpoint.load_universal is set"),
    ):
        if wrong:
            raise RestoreError(f"{what}: such an engine is loaded by engine.load_checkpoint() only")


def _on_nvme(offload: Any) -> bool:
    return offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme"
