"""Paths into nested containers as unambiguous strings.

A key is the path's components joined by ``/``. Strings are escaped like a JSON pointer (RFC 6901): ``~`` as ``~0``, and
``/`` as ``~1``. An integer, such as a list position or an optimizer's parameter number, is written in decimal. A
*string* that looks like an integer gets the prefix ``~2``. The empty string is ``~4``, because the empty key means the
root. Any other dictionary key is its ``repr`` with the prefix ``~3``. For example, ``{0: a, "0": b}`` has the keys
``0`` and ``~20``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_INTEGER = re.compile(r"-?[0-9]+\Z")
INNER = "~5"
"""Prefix of the keys of arrays inside pickled objects, which are no containers. No path component begins with it."""


def component(part: object) -> str:
    """Write one path component. Different ints, strs and ``repr``s give different components."""
    if type(part) is str:
        if not part:
            return "~4"
        text = part.replace("~", "~0").replace("/", "~1") if "~" in part or "/" in part else part
        # a first character above "9" rules out an integer
        return "~2" + text if part[0] <= "9" and _INTEGER.match(part) else text
    if type(part) is int:
        return str(part)
    return "~3" + repr(part).replace("~", "~0").replace("/", "~1")


def parts(key: str) -> list[str | int]:
    """Split a key into its components; raises ValueError if a component was neither a string nor an integer."""
    result: list[str | int] = []
    for text in key.split("/"):
        if _INTEGER.match(text):
            result.append(int(text))
        elif text[:2] in ("~3", INNER):
            raise ValueError(f"{key!r} is no path of strings and integers")
        else:
            plain = "" if text == "~4" else text.removeprefix("~2")
            result.append(plain.replace("~1", "/").replace("~0", "~"))
    return result


def is_inner(key: str) -> bool:
    """Whether a key belongs to an array inside a pickled object, which is no container."""
    return key.startswith(INNER) or f"/{INNER}" in key


def join(prefix: str, part: object) -> str:
    """Append a component to the key ``prefix``; the empty prefix is the root."""
    return f"{prefix}/{component(part)}" if prefix else component(part)


def of_tensor(key: str) -> str:
    """The key of arrays inside the tensor ``key``, which is no plain memory: the path within the tensor follows."""
    return f"{INNER}:{component(key)}"


_OF_TENSOR = re.compile(rf"(.*/|){INNER}[0-9]*:(?!~[35])([^/]*)(/.*|)", re.DOTALL)


def within(full: str, path: str) -> str:
    """The full key of an array inside a tensor of a file of another format, given both keys."""
    before, slash, last = full.rpartition("/")
    return f"{before}{slash}{of_tensor(last)}/{path}"


def around(full: str) -> tuple[str, str] | None:
    """The tensor's full key and the path, of a key of :func:`within`, or of one that a provider gave; else None."""
    found = _OF_TENSOR.fullmatch(full)
    return None if found is None else (f"{found[1]}{parts(found[2])[0]}", found[3][1:])


_OF_RANK = re.compile(re.escape(INNER) + r"@[0-9]+@([^:]*):([^/]*)(?:/|\Z)")


def of_rank(rank: int, box: str, key: str) -> str:
    """The key of arrays inside one rank's part of the DTensor ``key``; ``box`` is the part's place as a text."""
    return f"{INNER}@{rank}@{box}:{component(key)}"


_INSIDE = re.compile(rf"(.*/|){INNER}(?:[0-9]*|@([0-9]+)@[^:/]*):(?!~[35])([^/]*)(?:/(.*))?", re.DOTALL)
_ARGUMENTS = "1/3/"
"""What stands before the name of a part in checkpoints of earlier versions: its path in the tensor's pickle."""


def shown(key: str) -> str:
    """A full key for people: of an array inside a tensor, the tensor's key and the path within it, joined by dots.

    So ``model/~5:0.weight/qdata`` is ``model/0.weight.qdata``. In one rank's part of a DTensor the rank comes last.
    Other keys are returned as they are.
    """
    found = _INSIDE.fullmatch(key) if INNER in key else None
    if found is None:
        return key
    before, rank, outer, inside = found.groups()
    path = (inside or "").removeprefix(_ARGUMENTS).split("/")
    return before + ".".join(filter(None, [str(parts(outer)[0]), *path, rank and f"rank{rank}"]))


def is_of_rank(key: str) -> bool:
    """Whether a key is inside of one that :func:`of_rank` made."""
    return key.startswith(f"{INNER}@")


def boxes(keys: Iterable[str]) -> dict[str, str]:
    """The boxes of the DTensors whose parts are stored under keys of :func:`of_rank`, each by the DTensor's key."""
    found = (_OF_RANK.match(key) for key in keys if is_of_rank(key))
    return {str(parts(match[2])[0]): match[1] for match in found if match}


def state_key(parameter: object, state: str) -> str:
    """The key of one state of one parameter, as in a nested optimizer state dict."""
    return f"state/{component(parameter)}/{component(state)}"
