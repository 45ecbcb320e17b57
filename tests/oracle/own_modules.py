"""Modules of a user's own, which override or hook how their state is saved and loaded: one for each way there is."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from subject import Case, Subject
from torch import nn
from trained import floats, training


class Base(nn.Module):
    """A layer with parameters of two shapes, a buffer, and a scale that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.zeros(()))
        self.scale = float(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.detach().abs().sum()
            self.scale = self.scale * 0.9 + 0.1 * float(x.detach().abs().max())
        return (x @ self.a - x @ self.b) * self.scale


class ScalesOfEightBits(Base):
    """Keeps a history of largest values, and the scales made of it, as layers of 8-bit floats do."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = {"history": torch.zeros(3, 2), "scale": torch.ones(2), "format": ["e4m3", 448.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            history = self.scaling["history"].roll(1, 0)
            history[0] = torch.stack([x.detach().abs().max(), self.a.detach().abs().max()])
            self.scaling["history"], self.scaling["scale"] = history, 448.0 / history.amax(0).clamp(min=1e-3)
        return super().forward(x) * self.scaling["scale"].mean()


class AsDict(ScalesOfEightBits):
    def get_extra_state(self) -> Any:
        return {**self.scaling, "own": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scaling = dict(state)
        self.scale = self.scaling.pop("own")


class AsBytes(ScalesOfEightBits):
    def get_extra_state(self) -> Any:
        return torch.frombuffer(bytearray(pickle.dumps((self.scaling, self.scale))), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        self.scaling, self.scale = pickle.loads(state.numpy().tobytes())


class AsStream(ScalesOfEightBits):
    def get_extra_state(self) -> Any:
        stream = io.BytesIO()
        torch.save(self.scaling, stream)
        return stream

    def set_extra_state(self, state: Any) -> None:
        state.seek(0)
        self.scaling = torch.load(state)


class AsTensor(ScalesOfEightBits):
    def get_extra_state(self) -> Any:
        return self.scaling["history"]

    def set_extra_state(self, state: Any) -> None:
        self.scaling["history"] = state


class AsTensorInPlace(AsTensor):
    def set_extra_state(self, state: Any) -> None:
        self.scaling["history"].copy_(state * 2)


class AsNumber(Base):
    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


class AsNone(Base):
    def get_extra_state(self) -> Any:
        return None

    def set_extra_state(self, state: Any) -> None:
        self.scale = 7.0 if state is None else -1.0


class SavesScale(Base):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = float(state_dict.pop(prefix + "scale"))
        super()._load_from_state_dict(state_dict, prefix, *args)


class SavesNumber(Base):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(prefix + "scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class SavesTransposed(Base):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "a"] = destination[prefix + "a"].t()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "a"] = state_dict[prefix + "a"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class SavesHalf(Base):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in [key for key in destination if key.startswith(prefix)]:
            destination[key] = destination[key].bfloat16()


class RenewsWhatItDerives(Base):
    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0
        self.packed = self.a.detach() - self.b.detach()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.packed = self.a.detach() - self.b.detach()
        self.loaded += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.packed


class Resizes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.history = torch.cat([self.history, x.detach().mean()[None]])
        return super().forward(x)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.history = torch.empty_like(state_dict[prefix + "history"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class ResizesInPlace(Resizes):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.history.resize_(state_dict[prefix + "history"].shape)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class MakesParameters(Base):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in "ab":
            setattr(self, name, nn.Parameter(state_dict[prefix + name].clone()))
        super()._load_from_state_dict(state_dict, prefix, *args)


class KeepsWhatItIsGiven(Base):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        super()._load_from_state_dict(state_dict, prefix, *args)


class Copies(Base):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key: value.detach().clone() for key, value in super().state_dict(*args, **kwargs).items()}


class Wraps(Base):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"weights": super().state_dict(*args, **kwargs), "scale": self.scale, "steps": [1, (2, None)]}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.scale = state_dict["scale"]
        return super().load_state_dict(state_dict["weights"], strict, assign)


class Filters(Base):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict((k, v) for k, v in super().state_dict(*args, **kwargs).items() if k != "b")

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, False, assign)


class Assigns(Base):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign=True)


class Notes(Base):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self.noted = (sorted(state_dict), type(state_dict).__name__, self.a.detach().sum().item())
        return result


class Refuses(Base):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("this module loads nothing")


class RefusesLate(Base):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        super().load_state_dict(state_dict, *args, **kwargs)
        raise ValueError("this module loads, and complains")


def _prehook(change: Callable[[nn.Module, Any, str], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Base()

        def hook(own: nn.Module, state: Any, prefix: str, *_: Any) -> None:
            change(own, state, prefix)

        module.register_load_state_dict_pre_hook(hook)
        return module

    return make


def _swap(own: nn.Module, state: Any, prefix: str) -> None:
    state[prefix + "a"], state[prefix + "b"] = state[prefix + "b"], state[prefix + "a"]


def _transpose(own: nn.Module, state: Any, prefix: str) -> None:
    for name in "ab":
        state[prefix + name] = state[prefix + name].t()


def _rename(own: nn.Module, state: Any, prefix: str) -> None:
    if prefix + "old" in state:
        state[prefix + "a"] = state.pop(prefix + "old")


def _double_in_place(own: nn.Module, state: Any, prefix: str) -> None:
    state[prefix + "a"].mul_(2)


def _drop(own: nn.Module, state: Any, prefix: str) -> None:
    del state[prefix + "b"]


def _from_own(own: Any, state: Any, prefix: str) -> None:
    state[prefix + "a"] = own.a.detach() + state[prefix + "a"]


def _after_load(change: Callable[[Any, Any], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Base()
        module.register_load_state_dict_post_hook(lambda own, keys: change(own, keys))
        return module

    return make


def _halve(own: Any, keys: Any) -> None:
    with torch.no_grad():
        own.a.mul_(0.5)
    own.scale = 1.0


def _forgive(own: Any, keys: Any) -> None:
    keys.missing_keys.clear()
    keys.unexpected_keys.clear()


def _state_hook(change: Callable[[Any, Any, str], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Base()
        module._register_state_dict_hook(lambda own, state, prefix, metadata: change(own, state, prefix))
        module.register_load_state_dict_post_hook(lambda own, keys: _forgive(own, keys))
        return module

    return make


def _add(own: Any, state: Any, prefix: str) -> None:
    state[prefix + "extra"] = own.a.detach() * 2


def _cast(own: Any, state: Any, prefix: str) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[key] = state[key].detach().to(torch.bfloat16)


def _old_name(own: Any, state: Any, prefix: str) -> None:
    state[prefix + "old"] = state.pop(prefix + "a")


def _new_dict(own: Any, state: Any, prefix: str) -> Any:
    return OrderedDict((key, value.clone()) for key, value in state.items())


def _before_state() -> nn.Module:
    module = Base()

    def before(own: Any, prefix: str, keep_vars: bool) -> None:
        own.seen.copy_(own.a.detach().sum())

    module.register_state_dict_pre_hook(before)
    return module


CLASSES: tuple[type[nn.Module], ...] = (
    *(Base, AsDict, AsBytes, AsStream, AsTensor, AsTensorInPlace, AsNumber, AsNone),
    *(SavesScale, SavesNumber, SavesTransposed, SavesHalf, RenewsWhatItDerives, Resizes, ResizesInPlace),
    *(MakesParameters, KeepsWhatItIsGiven, Copies, Filters, Wraps, Assigns, Notes, Refuses, RefusesLate),
)
WHOLE = {Wraps, Filters, Assigns, Notes, Refuses, RefusesLate}
"""Their override is that of the outermost module: as a part of another one, they are plain."""

HOOKED: dict[str, Callable[[], nn.Module]] = {
    **{f"before load {f.__name__}": _prehook(f) for f in (_swap, _transpose, _double_in_place, _drop, _from_own)},
    **{f"after load {f.__name__}": _after_load(f) for f in (_halve, _forgive)},
    **{f"of state {f.__name__}": _state_hook(f) for f in (_add, _cast, _old_name, _new_dict)},
    "before state": _before_state,
}


def whole(make: Callable[[], nn.Module]) -> Subject:
    """A module by itself."""
    return training(make(), [floats(3, 4)])


def inside(make: Callable[[], nn.Module]) -> Subject:
    """A module within others."""
    return training(nn.Sequential(nn.Linear(4, 4), nn.Sequential(make()), nn.Linear(4, 4)), [floats(3, 4)])


class OldName(Base):
    """What an earlier version of a class saved."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "old"] = destination.pop(prefix + "a")


CONVERTED = {"SavesHalf", "of state _cast"}
"""They save other types than they have. Stock converts back unasked; ours refuses by name, or is asked by ``cast=``."""


def cases() -> Iterator[Case]:
    """All of them."""
    makers = {kind.__name__: kind for kind in CLASSES} | HOOKED
    for name, make in makers.items():
        yield Case(name, partial(whole, make), cast=name in CONVERTED)
        if make not in WHOLE:
            yield Case(f"{name} inside", partial(inside, make), cast=name in CONVERTED)
    yield Case("renamed by a hook", partial(inside, OldName), partial(inside, _prehook(_rename)))
    yield Case("an extra state that nobody takes", partial(whole, AsDict), partial(whole, Base))
    yield Case("an extra state that is missing", partial(whole, Base), partial(whole, AsDict))
    yield Case("another class's scale", partial(whole, SavesScale), partial(whole, SavesNumber))
    for norm in (torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm):
        old = partial(_normed, norm)
        yield Case(f"old {norm.__name__} into its parametrization", old, partial(_normed, _new(norm.__name__)))


def _new(name: str) -> Callable[[nn.Module], nn.Module]:
    found: Callable[[nn.Module], nn.Module] = getattr(nn.utils.parametrizations, name)
    return found


def _normed(norm: Callable[[nn.Module], nn.Module]) -> Subject:
    module = nn.Sequential(norm(nn.Linear(4, 4)))
    return Subject({"model": module}, lambda: module(torch.randn(3, 4)))
