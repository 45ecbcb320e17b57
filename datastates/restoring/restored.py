""":class:`Restored`, the result of a restore, :class:`Comparison`, and the messages about keys that do not fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from datastates._base import log
from datastates.errors import RestoreError
from datastates.executor.timeline import RESTORE_WAITS_FOR, Span, Stage, stages, write_trace
from datastates.reading.tensors import Tensors
from datastates.storage.location import Face, Location


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The cost of a restore on this rank. Times are seconds, sizes bytes, rates 10⁹ bytes per second.

    Attributes:
        step: The training step that was restored; 0 if a checkpoint of another format does not say.
        path: The path of the checkpoint; a string for an address in a store.
        nbytes: Bytes that this rank wanted of the files.
        read_nbytes: Bytes that this rank read, for itself and for the other ranks of its host.
        seconds: Duration of the ``restore()`` call. It includes the wait for snapshots in flight and for other ranks.
        stages: By the name of a stage, the sums of its work; see :class:`~datastates.executor.timeline.Stage`.

            - ``open``: waiting for snapshots in flight, choosing the checkpoint, opening it.
            - ``compare``: comparing it with the live state, on all ranks.
            - ``read``, ``verify``, ``copy``: the work of the native core: reads of extents, checksums, copies from the
              host cache into the state.
            - ``wait``: from the begin of the reads until all ranks have all bytes.
            - ``digest``: comparing digests.
            - ``objects``: giving the providers their objects.
    """

    step: int
    path: Face
    nbytes: int
    read_nbytes: int
    seconds: float
    stages: dict[str, Stage]

    @property
    def gbps(self) -> float | None:
        """Rate in 10⁹ wanted bytes per second of the call; None if no byte was wanted."""
        return self.nbytes / self.seconds / 1e9 if self.nbytes and self.seconds else None

    def __str__(self) -> str:
        """The most important figures, as one line for a log."""
        rate = f", {self.gbps:.2f} GB/s" if self.gbps else ""
        return f"step {self.step} restored: {self.nbytes / 1e9:.3f} GB in {self.seconds:.3f} s{rate}: {self.path}"


_SHOWN = 8
_WITHOUT_IT = r"restore(rename={re.compile(r'_orig_mod\.'): ''}) takes it out"


@dataclass(slots=True)
class Restored:
    """The result of a restore. The keys are full keys.

    Attributes:
        step: The training step that was restored; 0 if a checkpoint of another format does not say.
        path: The path of the checkpoint; a string for an address in a store.
        missing_keys: Keys that the live state has and the checkpoint lacks, on this rank. If the checkpoint did not
            have this rank, the rank keeps its per-rank state: the keys are listed but are no error.
        unexpected_keys: Keys, after ``rename``, that the checkpoint has and the live state of all ranks lacks.
        mismatched_keys: Keys whose shape, dtype or container type differs on this rank, each with the difference.
        unverified_keys: Keys whose contents could not be compared completely, neither with checksums nor with a digest.
            With ``verify="digest"``, keys whose digest could not be compared.
        left_out_keys: With ``keys``, on this rank: the unmatched keys of providers that are restored in part, and the
            names of providers that are not restored at all.
        cast_keys: Keys whose element type was converted on this rank, each with the stored and the live type.
        needed_nbytes: Bytes that this rank wanted of the files.
        read_nbytes: Bytes that this rank read.
        shared_nbytes: Bytes among ``read_nbytes`` that lie between rows of matrices that this rank wanted. They are
            read through the page cache: storage reads them once for all ranks of a host.
        source: For each place, which is a directory of checkpoints or the address of one, the bytes of arrays that this
            rank read from there.
        passed_over: With ``fallback=True``, the newer checkpoints that are damaged: the name of each directory, and its
            damage.
        spans: The timeline of this rank; :attr:`report` has its sums.
    """

    step: int
    path: Face
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched_keys: dict[str, str] = field(default_factory=dict)
    unverified_keys: list[str] = field(default_factory=list)
    left_out_keys: list[str] = field(default_factory=list)
    cast_keys: dict[str, str] = field(default_factory=dict)
    needed_nbytes: int = 0
    read_nbytes: int = 0
    shared_nbytes: int = 0
    source: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list, repr=False, compare=False)

    @property
    def report(self) -> RestoreReport:
        """The sizes, times and rates of the restore on this rank."""
        begin, end = min(s.begin for s in self.spans), max(s.end for s in self.spans)
        return RestoreReport(
            step=self.step,
            path=self.path,
            nbytes=self.needed_nbytes,
            read_nbytes=self.read_nbytes,
            seconds=end - begin,
            stages=stages(self.spans, RESTORE_WAITS_FOR),
        )

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of the restore, in the format that https://ui.perfetto.dev and Chrome show.

        Args:
            path: The file to write. An existing file is replaced.

        Raises:
            OSError: ``path`` cannot be written.
        """
        write_trace(path, self.spans, f"datastates, restore of step {self.step}")


def whole_in(restored: Restored) -> Location | None:
    """The checkpoint that was restored; None unless all of it was read, from that place."""
    path = Location(restored.path)
    is_whole = not (restored.left_out_keys or restored.missing_keys or restored.mismatched_keys)
    return path if is_whole and restored.source.keys() <= {str(path.parent)} else None


def misfit(stored: Tensors, result: Restored, lost: Mapping[str, str]) -> RestoreError:
    """Make the error that names the keys that do not fit.

    Args:
        stored: The checkpoint.
        result: The differences.
        lost: For some of the missing keys, the missing amount, or an advice, as text.
    """
    return RestoreError(
        f"{stored.path} does not fit the live state: {_differences(stored, result, lost)}",
        missing=result.missing_keys,
        unexpected=result.unexpected_keys,
        mismatched=[f"{key}: {what}" for key, what in result.mismatched_keys.items()],
        lost=[str(path) for _, path in sorted(stored.lost.items())] if result.missing_keys else (),
    )


def warn_of_rest(stored: Tensors, result: Restored, lost: Mapping[str, str]) -> None:
    """Log a warning that names the keys that a restore leaves unchanged, if any; takes the same as :func:`misfit`."""
    counts = len(result.missing_keys), len(result.unexpected_keys), len(result.mismatched_keys)
    if any(counts):
        log.warning(
            "%s is restored in part: %d missing, %d unexpected and %d mismatched keys are left out: %s",
            *(stored.path, *counts, _differences(stored, result, lost)),
        )


def warn_of_unverified(keys: Sequence[str]) -> None:
    """Log a warning that names the keys that could not be verified, if there are any."""
    if keys:
        log.warning("read without checksums, and no digest to compare with: %s", sorted(keys)[:_SHOWN])


def shortened(texts: Sequence[str], separator: str = ", ") -> str:
    """Join the first few texts, and add the number of further ones."""
    rest = f"{separator}and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return separator.join(texts[:_SHOWN]) + rest


def _differences(stored: Tensors, result: Restored, lost: Mapping[str, str]) -> str:
    parts = []
    if result.missing_keys:
        files = ", ".join(path.name for _, path in sorted(stored.lost.items())[:_SHOWN])
        why = f" as {files} is missing" if files else ""
        keys = [f"{key!r} ({lost[key]})" if key in lost else repr(key) for key in result.missing_keys]
        parts.append(f"the checkpoint lacks {shortened(keys)}{why}{_whole(stored, result.missing_keys)}")
    if result.unexpected_keys:
        hint = " (restore(rename=...) finds arrays under other names)" if result.missing_keys else ""
        if any("_orig_mod." in key for key in result.unexpected_keys):
            hint = f" (torch.compile has put '_orig_mod.' into names; {_WITHOUT_IT})"
        parts.append(f"the live state lacks {shortened(list(map(repr, result.unexpected_keys)))}{hint}")
    if result.mismatched_keys:
        parts.append(shortened([f"{key!r}: {what}" for key, what in result.mismatched_keys.items()], "; "))
    return "; ".join(parts)


def _whole(stored: Tensors, missing: Sequence[str]) -> str:
    """The advice about missing keys inside an object that needs its class, such as a module that was saved whole."""
    if not stored.is_listed:
        return ""
    # only objects of other formats have no offset; objects of this package may be large, and list their arrays
    others = ((key, entry) for key, entry in stored.objects().items() if entry.offset is None)
    around = ((key, entry) for key, entry in others if not key or missing[0].startswith(f"{key}/"))
    found = next(((key, kinds) for key, entry in around if (kinds := entry.classes())), None)
    return "" if found is None else f" ({of_classes(*found)})"


def of_classes(key: str, kinds: Sequence[str]) -> str:
    """The advice about an object whose tensors cannot be read without its classes."""
    what = repr(key) if key else "its value"
    return (
        f"{what} is saved whole, as an object of {shortened(kinds)}: load it with trust in that, as by torch.load, and "
        "save its state_dict()"
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome that a restore would have, on this rank. Its text has a line for each key.

    Attributes:
        path: The path of the checkpoint; a string for an address in a store.
        step: The training step that would be restored.
        restored_keys: Full keys, in the live state, of the arrays and objects that would be restored, converted arrays
            among them.
        cast_keys: Keys of the arrays whose element type would be converted, each with the stored and the live type.
        missing_keys, unexpected_keys, mismatched_keys, left_out_keys: As in
            :class:`~datastates.restoring.restored.Restored`.
        nbytes: Bytes that this rank would fill without a conversion.
    """

    path: Face
    step: int
    restored_keys: tuple[str, ...]
    cast_keys: dict[str, str]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    mismatched_keys: dict[str, str]
    left_out_keys: tuple[str, ...]
    nbytes: int

    @property
    def fits(self) -> bool:
        """Whether a strict restore would accept the checkpoint."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched_keys)

    def __str__(self) -> str:
        """The outcome for each key, one key a line."""
        plain = [key for key in self.restored_keys if key not in self.cast_keys]
        lines = [
            *(("restored", key, "") for key in plain),
            *(("cast", key, types) for key, types in self.cast_keys.items()),
            *(("mismatched", key, what) for key, what in self.mismatched_keys.items()),
            *(("missing", key, "not in the checkpoint") for key in self.missing_keys),
            *(("unexpected", key, "not in the live state") for key in self.unexpected_keys),
            *(("left out", key, "") for key in self.left_out_keys),
        ]
        return "\n".join([f"{self.path}, step {self.step}", *(f"  {a:<10}  {b}  {c}".rstrip() for a, b, c in lines)])
