"""A tensor that consists of two others, as the quantized weights of torchao do."""

from __future__ import annotations

from typing import Any

import torch


class Pair(torch.Tensor):
    """Two tensors and a number, which look like the first one."""

    first: torch.Tensor
    second: torch.Tensor
    number: int

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor, number: int) -> Pair:
        """Make a tensor without memory of its own."""
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, first: torch.Tensor, second: torch.Tensor, number: int) -> None:
        """Keep the parts."""
        self.first, self.second, self.number = first, second, number

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Tell the parts."""
        return ["first", "second"], self.number

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Pair:
        """Make a tensor of other parts."""
        return Pair(parts["first"], parts["second"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detach, or take the parts of another one that has the same number."""
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if type(source) is not cls or source.number != target.number:
                raise ValueError(f"a Pair of {target.number} takes no {getattr(source, 'number', 'other')}")
            target.first.copy_(source.first)
            target.second.copy_(source.second)
            return target
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].first, args[0].second, args[0].number)
        raise NotImplementedError(func)
