"""vLLM: the load format ``datastates``, which serves straight from a training checkpoint.

Written for ``BaseModelLoader`` of vLLM 0.32.0. vLLM finds :func:`register` by the entry point ``vllm.general_plugins``
in each of its processes, of which few load weights: so all that is not needed for that is imported later.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

if TYPE_CHECKING:
    from datastates.reading.checkpoint import Checkpoint
    from datastates.serving.needed import Needed

_EXTRA = {"checkpoint", "prefix", "step"}


class DataStatesModelLoader(BaseModelLoader):
    """Loads a model's weights from a checkpoint that :func:`datastates.open` takes, verified where it has checksums.

    ``model_loader_extra_config`` may have:

    - ``checkpoint``: path or address of the checkpoint. Without it the model's folder is the checkpoint, too.
    - ``step``: the checkpoint of that step; otherwise the newest.
    - ``prefix``: what stands before the weights' names in the full keys, where several models are in the checkpoint.

    Names and shapes are compared with those of transformers' model for the configuration; vLLM itself notices few of
    such faults. All workers take the same step. With tensor parallelism each reads the part that vLLM cuts out for it.
    """

    def __init__(self, load_config: Any) -> None:
        """Check vLLM's ``LoadConfig``."""
        super().__init__(load_config)
        self._extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        if unknown := sorted(self._extra.keys() - _EXTRA):
            raise ValueError(f"model_loader_extra_config: {', '.join(unknown)} is none of {', '.join(sorted(_EXTRA))}")

    def download_model(self, model_config: Any) -> None:
        """Do nothing: weights are read where they lie."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill the model of vLLM.

        Raises:
            DatastatesError: The checkpoint is not exactly of this model, or vLLM has left a weight unset.
            CorruptError: Bytes do not match their checksum.
            StorageError: A file is missing or cannot be read.
        """
        from vllm.distributed import get_tensor_model_parallel_world_size

        from datastates.errors import DatastatesError
        from datastates.serving.unread import Unread

        object.__setattr__(model_config, "_datastates_folder", model_config.model)
        in_order = get_tensor_model_parallel_world_size() == 1
        with self._open(model_config) as (opened, keys, needed):
            own = _own(model)
            names = _wanted(keys, needed, own)
            loaded = model.load_weights((name, Unread.of(opened, keys[name], in_order=in_order)) for name in names)
        if left := set() if loaded is None else own - loaded:
            told = ", ".join(sorted(left)[:5])
            raise DatastatesError(f"{model_config.model}: vLLM has not set {told}, although all was given")

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Read all weights, each as a whole, for vLLM's ``reload_weights``; raises as :meth:`load_weights`."""
        with self._open(model_config) as (opened, keys, needed):
            for name in _wanted(keys, needed, _own(model)):
                yield name, opened[keys[name]]

    @contextlib.contextmanager
    def _open(self, model_config: Any) -> Iterator[tuple[Checkpoint, dict[str, str], Needed]]:
        from datastates.errors import DatastatesError
        from datastates.serving.model_keys import model_keys
        from datastates.serving.needed import needed_by

        if model_config.quantization is not None:
            raise DatastatesError(
                f"quantization={model_config.quantization!r} with load_format='datastates': not tried"
            )
        if "draft" in (getattr(model_config, "runner", None), getattr(model_config, "runner_type", None)):
            raise DatastatesError("load_format='datastates' is not for draft models: give them draft_load_config")
        folder = model_config.model
        if folder != getattr(model_config, "_datastates_folder", folder):  # reload_weights(weights_path=)
            place, step = folder, None
        else:
            address = getattr(model_config, "model_weights", "") or folder
            place, step = str(self._extra.get("checkpoint", address)), self._extra.get("step")
        needed = needed_by(model_config.hf_config)
        with _opened_by_all(place, step) as opened:
            yield opened, model_keys(opened, needed, self._extra.get("prefix"), place), needed


def _opened_by_all(place: str, step: int | None) -> Checkpoint:
    """Open a checkpoint of the step that the first worker takes: a newer one may be committed meanwhile."""
    from vllm.distributed import get_world_group

    from datastates.api import open as open_checkpoint
    from datastates.errors import DatastatesError

    group = get_world_group()
    if group.rank_in_group != 0:
        found, failure = group.broadcast_object()
        if failure is not None:
            raise DatastatesError(f"the first worker cannot open {place}: {failure}")
        return open_checkpoint(place, step=found, framework="pt")
    try:
        opened = open_checkpoint(place, step=step, framework="pt")
    except BaseException as error:
        group.broadcast_object((None, str(error)))
        raise
    group.broadcast_object((opened.step, None))
    return opened


def _own(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _wanted(keys: dict[str, str], needed: Needed, own: set[str]) -> list[str]:
    """The names to hand over: of tied weights the first, and the others that the model of vLLM has by themselves."""
    return [name for name in keys if name not in needed.tied or name in own]


@functools.cache
def register() -> None:
    """Make the load format known to vLLM in this process. vLLM may call it several times."""
    register_model_loader("datastates")(DataStatesModelLoader)
