""":class:`ReadRequest`: the options of ``load()`` and ``open()``, which are checked once."""

from __future__ import annotations

from dataclasses import dataclass

from datastates.commit.names import checked_step
from datastates.container.pickle_reader import Trust, check_trust
from datastates.state.new_memory import AS_SAVED, Device, Framework, Into


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Which checkpoint is read into new memory, and as which arrays. Immutable.

    Attributes:
        step: The step of the checkpoint; None for the newest, or for that of a single checkpoint.
        into: Library and device of the new arrays.
        trust: Classes that pickled objects may have, as ``module.qualname``; ``"all"`` for any class.
    """

    step: int | None = None
    into: Into = AS_SAVED
    trust: Trust = ()

    @classmethod
    def of(
        cls, step: int | None, framework: Framework | None = None, device: Device = "cpu", trust: Trust = ()
    ) -> ReadRequest:
        """Check arguments as a user gave them.

        Raises:
            TypeError, ValueError: A value is impossible, or values exclude each other.
            ImportError: torch is wanted and not installed.
        """
        check_trust(trust)
        return cls(None if step is None else checked_step(step), Into.of(framework, device), trust)
