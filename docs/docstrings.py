"""Shows the roles of Sphinx in docstrings, as :class:`~datastates.Checkpointer`, as links on the pages of the API.

An extension of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")


class Links(griffe.Extension):
    """Replaces each role by the name as code, with a link where the page of that name is on the site."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub(lambda role: _link(obj, role[2], short=bool(role[1])), obj.docstring.value)


def _link(obj: griffe.Object, name: str, *, short: bool) -> str:
    path = name if name.startswith("datastates.") else f"{_resolved(obj, name)}"
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'


def _resolved(obj: griffe.Object, name: str) -> str:
    first, _, rest = name.partition(".")
    try:
        return obj.resolve(first) + (f".{rest}" if rest else "")
    except griffe.NameResolutionError:
        return name
