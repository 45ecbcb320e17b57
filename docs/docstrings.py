"""Shows the roles of Sphinx in docstrings as links on the pages of the API, and options by their names.

Extensions of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

import griffe

UNPACK = re.compile(r"Unpack\[(\w+)\]")
FIELDS = re.compile(r"^( *)\*\*\w+: [^\n]*?(:class:`[^`]+`|<autoref.*?</autoref>)[^\n]*(?:\n\1 +[^\n]*)*", re.MULTILINE)
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


class Options(griffe.Extension):
    """Shows the fields of a ``TypedDict`` in the place of ``**options: Unpack[...]``, each as an argument."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        last = list(func.parameters)[-1:]
        if not last or not (found := UNPACK.fullmatch(str(last[0].annotation))):
            return
        module, _, name = func.resolve(found[1]).rpartition(".")
        fields = getattr(importlib.import_module(module), name).__annotations__
        del func.parameters[last[0].name]
        for field, kind in fields.items():
            shown = getattr(kind, "__forward_arg__", str(kind))
            func.parameters.add(
                griffe.Parameter(field, annotation=shown, kind=griffe.ParameterKind.keyword_only, default="...")
            )
        if func.docstring:
            func.docstring.value = FIELDS.sub(lambda line: _fields(line, fields), func.docstring.value)


def _fields(line: re.Match[str], fields: Iterable[str]) -> str:
    """A line for each field, in the place of one for all of them. The class that they belong to explains them."""
    return "\n".join(f"{line[1]}{field}: A field of {line[2]}." for field in fields)
