""":class:`RestoreRequest`: the options of a restore, which are checked once, and which all its stages take."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from typing_extensions import TypedDict

from datastates.commit.names import checked_step
from datastates.container.pickle_reader import Trust, check_trust
from datastates.restoring.renaming import Renames, as_text, checked_renames
from datastates.restoring.selection import Keys, checked_keys

Verify = Literal["checksum", "digest"]


class CompareOptions(TypedDict, total=False):
    """The fields of :class:`RestoreRequest` that a comparison takes, for type checkers."""

    step: int | None
    keys: Keys | None
    rename: Renames
    cast: bool
    trust: Trust


class RestoreOptions(CompareOptions, total=False):
    """The fields of :class:`RestoreRequest` as keyword arguments, for type checkers."""

    strict: bool
    verify: Verify
    fallback: bool


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Which checkpoint is restored, how much of it, and how. Immutable.

    ``restore()`` and ``compare()`` take the attributes as keyword arguments. All but ``strict`` and ``trust`` must be
    the same on all ranks.

    Attributes:
        step: The step of the checkpoint; None for the newest.
        keys: A glob, or several, such as ``"model/*"`` or ``"model/*lora_*"``. Globs match full keys of the live state,
            after ``rename``. Only matching arrays and values are compared and restored. All other live values stay as
            they are. A provider's name means all of it. An optimizer or a random state is restored as a whole only.
            None restores all.
        rename: New full keys of the checkpoint's arrays. ``{"encoder/": "model/"}`` replaces a prefix; a compiled
            pattern is replaced as by ``re.sub``. The first rename that matches a key is used. A provider that loses or
            gets an array by a rename is matched by the names of its arrays alone: its other values stay as they are.
            Optimizers and random states cannot be renamed.
        cast: Convert arrays whose floating-point type differs from the live array's, while they are read and verified.
            Their digests are not compared, as a digest depends on the element type. All other differences of element
            types are mismatches.
        strict: Refuse missing, unexpected and mismatched keys. False restores the keys that fit. The other keys are
            logged as a warning, and listed in ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys`` of the
            result. If nothing fits at all, RestoreError is raised all the same.
        trust: Classes that pickled objects may have, as ``module.qualname``; ``"all"`` for any class, which lets the
            checkpoint run code.
        verify: ``"checksum"`` verifies the read bytes with the checksums of the files. ``"digest"`` also compares the
            digest of every restored logical tensor, over all ranks, with the saved digest. If only a little of a chunk
            is wanted, it may be read without its checksum; the digest of the tensor is then compared in any case.
        fallback: If the newest checkpoint is damaged, restore the newest undamaged one, the same on all ranks. A
            warning and ``passed_over`` of the result name the damaged checkpoints. Not allowed with ``step`` or with
            ``strict=False``.
    """

    step: int | None = None
    keys: tuple[str, ...] | None = None
    rename: Renames = field(default_factory=lambda: MappingProxyType({}))
    cast: bool = False
    strict: bool = True
    trust: Trust = ()
    verify: Verify = "checksum"
    fallback: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RestoreRequest:
        """Check keyword arguments as a user gave them.

        Raises:
            TypeError, ValueError: A name is unknown, a value is impossible, or values exclude each other.
        """
        known = {f.name: f for f in fields(cls)}
        for name in options:
            if name not in known:
                raise TypeError(f"restore() has no argument {name!r}; it has {', '.join(known)}")
        given = dict(options)
        if (step := given.get("step")) is not None:
            given["step"] = checked_step(step)
        given["keys"] = checked_keys(given.get("keys"))
        given["rename"] = checked_renames(given.get("rename", {}))
        request = cls(**given)
        request._check()
        return request

    def _check(self) -> None:
        if not isinstance(self.cast, bool):
            raise TypeError(
                f"cast: {self.cast!r} is neither True nor False: arrays are cast to the types of the live ones"
            )
        check_trust(self.trust)
        if self.verify not in get_args(Verify):
            raise ValueError(f"verify: {self.verify!r} is none of {', '.join(map(repr, get_args(Verify)))}")
        if self.fallback and self.step is not None:
            raise ValueError(f"fallback: is for the newest checkpoint, and step={self.step} names one")
        if self.fallback and not self.strict:
            raise ValueError("fallback: needs strict=True: what the older checkpoint lacks would stay half overwritten")

    @property
    def wish(self) -> str:
        """The options that must be the same on all ranks, as a text by which ranks compare their requests."""
        newest = "the newest that is whole" if self.fallback else "the newest"
        which = newest if self.step is None else f"step {self.step}"
        renames = [(as_text(o), o.flags if isinstance(o, re.Pattern) else None, new) for o, new in self.rename.items()]
        verify = "" if self.verify == "checksum" else self.verify
        how = {"keys": self.keys and list(self.keys), "rename": renames, "cast": self.cast, "verify": verify}
        told = ", ".join(f"{name}={value}" for name, value in how.items() if value)
        return f"{which} with {told}" if told else which


def divide(options: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the keyword arguments of a call into the arguments with the given names, and all others."""
    return {k: v for k, v in options.items() if k in names}, {k: v for k, v in options.items() if k not in names}
