"""Finds a model's weights in a checkpoint, and refuses by name what is not exactly that model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from datastates.errors import DatastatesError
from datastates.reading.checkpoint import Checkpoint
from datastates.serving.needed import Needed

_FLOATS = {"float32", "float64", "float16", "bfloat16"}
_SHOWN = 5
_UNUSED = ".rotary_emb.inv_freq"
"""The end of names that old checkpoints have and models compute."""
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_layer.")
"""What torch.compile, FSDP, activation checkpointing and PEFT put into names."""
_TRAINED_BESIDE = ("lora_", "prompt_encoder", "modules_to_save", "v_head")
"""Parts of names of weights that were trained beside a model, and belong to what it computes."""
_SHARE = 0.1
"""Share of a model's weights from which on a place counts as one with a model."""


def model_keys(opened: Checkpoint, needed: Needed, prefix: str | None, place: str) -> dict[str, str]:
    """Find the full key of each weight that a model needs. Nothing is read but the keys, and tied weights.

    Args:
        opened: The checkpoint.
        needed: The weights.
        prefix: What stands before the weights' names in the full keys; None: it is looked for.
        place: The checkpoint, for messages.

    Returns:
        The full key of each weight in the order of the checkpoint. Of tied weights of which one was saved, each has the
        key of that.

    Raises:
        DatastatesError: A weight is missing, has another shape or is of no floating-point type; or the checkpoint has
            others in the same place, weights of several models, or two different weights that the model ties.
    """
    keys = list(opened)
    if prefix is None:
        chosen = _prefix(keys, needed, place)
        beside = [key for key in keys if any(part in key for part in _TRAINED_BESIDE)]
        if beside:
            _refuse(
                place, f"has trained weights beside the model below {chosen!r}: merge them, or give prefix=", beside
            )
    else:
        chosen = prefix
    known = set(keys)
    own = {name: chosen + name for name in needed.shapes if chosen + name in known}
    groups: dict[str, list[str]] = {}
    for name, first in needed.tied.items():
        groups.setdefault(first, [first]).append(name)
    saved = dict(own)
    for group in groups.values():
        there = [name for name in group if name in own]
        saved |= {name: own.get(name, own[there[0]]) for name in group} if there else {}
        _check_ties(opened, [own[name] for name in there], place)
    missing = [name for name in needed.shapes if name not in saved]
    if missing:
        _refuse(place, f"lacks weights of the model below {chosen!r}", missing)
    strange = [name for name in _beside(keys, chosen, needed) if not name.endswith(_UNUSED)]
    if strange:
        _refuse(place, f"has below {chosen!r} what the model does not have", strange)
    _check_kinds(opened, needed, saved, place)
    order = {key: i for i, key in enumerate(keys)}
    return dict(sorted(saved.items(), key=lambda one: order[one[1]]))


def _beside(keys: Iterable[str], prefix: str, needed: Needed) -> list[str]:
    """What lies beside the weights in their piece of state, which ends where a ``/`` or a prefix with a dot does.

    Without any prefix other state may lie beside the model, below other names than the model's first ones.
    """
    scope = prefix[: prefix.rfind("/") + 1] or prefix
    needs = {prefix + name for name in needed.shapes}
    other = [key for key in keys if key.startswith(scope) and key not in needs]
    tops = {name.partition(".")[0] for name in needed.shapes}
    return other if scope else [key for key in other if key.partition(".")[0] in tops]


def _prefix(keys: Collection[str], needed: Needed, place: str) -> str:
    """What stands before the weights' names, where there is one place with weights of the model."""
    probes = {name for name in needed.shapes if name not in needed.tied and name not in needed.tied.values()}
    found = Counter(prefix for key in keys for prefix in _prefixes(key, probes))
    candidates = [prefix for prefix, count in found.items() if count >= max(1, _SHARE * len(probes))]
    if not candidates:
        tops = sorted({key.partition("/")[0] + "/" if "/" in key else key for key in keys})
        _refuse(place, f"has no weights of the model, such as {max(probes, key=len)!r}; it has", tops)
    if len(candidates) > 1:
        _refuse(place, "has weights of the model in several places: say by prefix= which, of", sorted(candidates))
    return candidates[0]


def _prefixes(key: str, names: Collection[str]) -> Iterator[str]:
    """What stands in a key before one of some names, as if no wrapper had put anything into it."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    starts = [0, *(i + 1 for i, letter in enumerate(key) if letter in "/.")]
    return (key[:at] for at in starts if key[at:] in names)


def _check_kinds(opened: Checkpoint, needed: Needed, saved: dict[str, str], place: str) -> None:
    wrong = [
        f"{name}: {opened.shape(key)}, and the model has {needed.shapes[name]}"
        for name, key in saved.items()
        if opened.shape(key) != needed.shapes[name]
    ]
    if wrong:
        _refuse(place, "has weights of other shapes than the model", wrong)
    types = {name: opened.dtype(saved[name]) for name in saved if name in needed.floats}
    others = [f"{name}: {dtype}" for name, dtype in types.items() if dtype not in _FLOATS]
    if others:
        _refuse(place, "has weights that are no floating-point numbers", others)


def _check_ties(opened: Checkpoint, keys: list[str], place: str) -> None:
    for key in keys[1:]:
        known = opened.digest(key), opened.digest(keys[0])
        alike = opened.shape(key) == opened.shape(keys[0])
        if alike:
            alike = bool((opened[key] == opened[keys[0]]).all()) if None in known else known[0] == known[1]
        if not alike:
            _refuse(place, "has two different weights that the configuration ties", [key, keys[0]])


def _refuse(place: str, what: str, names: Iterable[str]) -> None:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise DatastatesError(f"{place} {what}: {', '.join(names[:_SHOWN])}{more}")
