"""The pages of the reference are complete: every public name, every error."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from datastates import errors

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = (
    "datastates",
    "datastates.providers",
    "datastates.testing",
    "datastates.adapters",
    "datastates.adapters.dcp",
    "datastates.adapters.deepspeed",
    "datastates.adapters.lightning",
    "datastates.adapters.megatron",
)


def public_names(package: str) -> set[str]:
    """``__all__`` of a package as its source has it: an import would need the frameworks."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_has_every_public_name(package: str) -> None:
    pages = "".join(page.read_text() for page in DOCS.glob("api*.md"))
    assert set(re.findall(rf"^::: {re.escape(package)}\.(\w+)$", pages, re.M)) == public_names(package)


def test_the_page_of_errors_has_every_class() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.DatastatesError)
    }
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "errors.md").read_text(), re.M)
    assert sorted(rows) == sorted(classes - {"DatastatesError"})
