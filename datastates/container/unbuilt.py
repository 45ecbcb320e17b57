"""Stand-ins for objects that are not built, because the code of their classes must not run."""

from __future__ import annotations

from typing import Any


class Unbuilt:
    """Stands in a structure for an object of another class, whose code is not run.

    Attributes:
        arguments: The arguments for the class's call; for a named tuple, its items.
        attributes: Of a tensor without memory of its own, which consists of others: its attributes; else None.
    """

    arguments: tuple[Any, ...]
    attributes: dict[str, Any] | None = None

    def __new__(cls, *arguments: Any) -> Unbuilt:
        """Keep the arguments, whether the pickle calls the class or makes an object by ``__new__`` alone."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        del arguments

    def __call__(self, *arguments: Any) -> Unbuilt:
        """Stand for the result of a call: this may itself stand for a nested class, which a function has looked up."""
        return type(self)(*arguments)

    def _ignore(self, *state: Any) -> None:
        del state

    append = extend = __setitem__ = __setstate__ = _ignore
