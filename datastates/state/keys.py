"""Paths into nested containers as unambiguous strings.

A key is the path's components joined by ``/``, escaped like a JSON pointer (RFC 6901): ``~`` as ``~0``, ``/`` as
``~1``. Integers (list positions, the optimizer's parameter numbers) stand as they are; a *string* that looks like an
integer is marked ``~2``; any other dictionary key is its ``repr``, marked ``~3``; the empty string is ``~4``, so that
the empty key is free to mean the root. ``{0: a, "0": b}`` gives the two keys ``0`` and ``~20``.
"""

from __future__ import annotations

import re

_INTEGER = re.compile(r"-?[0-9]+\Z")


def component(part: object) -> str:
    """Write one path component; pure and injective over int, str and what ``repr`` tells apart."""
    if type(part) is str:
        if not part:
            return "~4"
        text = part.replace("~", "~0").replace("/", "~1") if "~" in part or "/" in part else part
        # what follows the digits in order can be no integer
        return "~2" + text if part[0] <= "9" and _INTEGER.match(part) else text
    if type(part) is int:
        return str(part)
    return "~3" + repr(part).replace("~", "~0").replace("/", "~1")


def parts(key: str) -> list[str | int]:
    """Take a key apart; raises ValueError for a component that was neither a string nor an integer."""
    result: list[str | int] = []
    for text in key.split("/"):
        if _INTEGER.match(text):
            result.append(int(text))
        elif text[:2] in ("~3", "~5"):
            raise ValueError(f"{key!r} is no path of strings and integers")
        else:
            plain = "" if text == "~4" else text.removeprefix("~2")
            result.append(plain.replace("~1", "/").replace("~0", "~"))
    return result


def join(prefix: str, part: object) -> str:
    """Append a component to a key; an empty prefix is the root."""
    return f"{prefix}/{component(part)}" if prefix else component(part)
