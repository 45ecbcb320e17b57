"""Make what ``commands.md`` and ``settings.md`` repeat of the code: ``python docs/reference.py [--check]``.

A page is its own template. Texts of ``--help`` and rows of settings are made anew; the prose around them, and the last
cell of a row, stay.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from pydantic import BaseModel

from datastates.adapters.deepspeed.settings import DeepSpeedSettings
from datastates.cli import commands
from datastates.config import IoSettings, RankSettings, Settings
from datastates.files.settings import FileSettings
from datastates.kept import TierSettings

DOCS = Path(__file__).parent
IO, RANKS, FILES = set(IoSettings.model_fields), set(RankSettings.model_fields), set(FileSettings.model_fields)
TABLES: list[tuple[type[BaseModel], set[str]]] = [
    (Settings, IO),
    (Settings, RANKS - IO),
    (Settings, set(Settings.model_fields) - RANKS),
    (TierSettings, set(TierSettings.model_fields)),
    (FileSettings, FILES - IO),
    (DeepSpeedSettings, set(DeepSpeedSettings.model_fields) - FILES),
]
"""The tables of ``settings.md``: each a model, and those of its fields that the table has."""


def command_page(page: str) -> str:
    """``commands.md`` with the help of each command, one section each."""
    (found,) = (a for a in commands._parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in found.choices.items():
        section = re.search(rf"^## {name}\n\n```text\n(.*?)```", page, re.DOTALL | re.M)
        assert section, f"commands.md lacks a section `## {name}` with a block of text"
        if section[1].split() != parser.format_help().split():  # Pythons differ in their line breaks
            page = page[: section.start(1)] + parser.format_help() + page[section.end(1) :]
    return page


def settings_page(page: str) -> str:
    """``settings.md`` with a row for each field of ``TABLES``."""
    tables = iter(TABLES)
    return re.sub(r"(?<=\| --- \|\n)(\|.*\n)+", lambda found: rows(found[0], *next(tables)), page)


def rows(old: str, model: type[BaseModel], names: set[str]) -> str:
    """The rows of one table; raises SystemExit for a field without a last cell: who should set it, and where."""
    reasons = dict(re.findall(r"^\| `(\w+)` .* \| (.*) \|$", old, re.M))
    lines = []
    for name, field in model.model_fields.items():
        if name in names:
            default = "8MiB" if name == "block" else "–" if field.is_required() else field.default
            has_variable = issubclass(model, IoSettings) and name != "on_commit"  # no text is a callable
            variable = f"`DATASTATES_{name.upper()}`" if has_variable else "–"
            reason = reasons.get(name) or sys.exit(f"settings.md: say where to set {name}: | `{name}` | … |")
            lines.append(f"| `{name}` | `{default}` | {variable} | {field.description} | {reason} |\n")
    return "".join(lines)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "110"
    for path, make in ((DOCS / "commands.md", command_page), (DOCS / "settings.md", settings_page)):
        if (text := make(path.read_text())) != path.read_text():
            if sys.argv[1:] == ["--check"]:
                sys.exit(f"{path} is stale: make format")
            path.write_text(text)
