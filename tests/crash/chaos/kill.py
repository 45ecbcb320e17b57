"""Kills training loops at changes of their files, resumes them, and counts what came back: stock beside this package.

``python tests/crash/chaos/kill.py FOLDER`` needs the package ``ckpt-chaos``. FOLDER gets what each run left, and must
be new. It prints a table, and each kill after which the resume failed, gave another result, or began before the newest
complete checkpoint. It exits with 1 if this package has one that is not among the ``known`` of its case, or that stock
did not have in the same run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_chaos.byo import run_byo
from ckpt_chaos.runner import Row

HERE = Path(__file__).parent
MODES = ("before", "torn", "term", "unsynced")
VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK", "CONTROL_FAIL", NOT_KILLED := "NOT_KILLED")
GOOD = ("PASS", NOT_KILLED)
# DeepSpeed orders its groups of parameters by a set of names
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
WAYS = ("stock", "ours")


@dataclass(frozen=True)
class Case:
    """A loop that is killed.

    Attributes:
        script: The file in this folder.
        stock, ours: The globs of the checkpoints that each way leaves.
        ranks: The number of processes.
        options: More arguments of the script.
        points: The number of kills, spread over the modes and over the changes of files. More than there are: all.
            Where there is something ``known``, enough that stock shows it.
        known: Verdicts that the framework itself brings about, whoever writes. Stock must show them.
    """

    script: str
    stock: str = "checkpoint-*"
    ours: str = "checkpoint-*"
    ranks: int = 1
    options: tuple[str, ...] = ()
    points: int = 12
    known: tuple[str, ...] = ()


# last.ckpt is made after the checkpoint that it is a copy of
_LIGHTNING = Case("lightning_loop.py", "checkpoints/ck-*", "checkpoints/ck-*", points=16, known=("LOST_WORK",))
CASES = {
    "loop": Case("loop.py", "step-*.pt", "step-*", points=40),
    "loop, two ranks": Case("loop.py", "step-*.pt", "step-*", ranks=2, points=24),
    "Trainer": Case("trainer.py"),
    "Trainer with DeepSpeed": Case("trainer.py", options=("--deepspeed",), points=16, known=("HARD_FAIL",)),
    "accelerate": Case("accelerate_loop.py"),
    "Lightning": _LIGHTNING,
    "Lightning, save_last='link'": replace(_LIGHTNING, options=("--link",)),
}


def verdicts(case: Case, way: str, folder: Path, points: int, modes: Sequence[str] = MODES) -> dict[str, str]:
    """Kill one loop at up to so many ``points``.

    Returns:
        What ckpt-chaos says of each, and of a run that nobody kills. ``NOT_KILLED`` in the place of ``PASS``: the run
        ended by itself, and another change of files stood where it was to be killed.
    """
    os.environ.update(ENVIRONMENT)
    rows = run_byo(
        [sys.executable, str(HERE / case.script), way, "--out", "{out}", *case.options],
        None,
        folder,
        max_points=points,
        result_file="{out}/final.pt",
        step_regex=r"resumed from step (\d+)",
        modes=tuple(modes),
        checkpoint_glob="{out}/" + getattr(case, way),
        ignore_size=True,
        ranks=case.ranks,
        timeout=300,
        jobs=os.cpu_count() or 1,
    )
    return {row.label: _verdict(row) for row in rows}


def _verdict(row: Row) -> str:
    return NOT_KILLED if row.verdict == "PASS" and row.drift and not row.crashed else row.verdict


def main() -> int:
    """Run the cases and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--points", type=int, help="kills of each way of a case, in place of the case's own number")
    given = parser.parse_args()
    table, bad, worse = ["| | | " + " | ".join(VERDICTS) + " |", "| --- " * (len(VERDICTS) + 2) + "|"], [], False
    for name in given.only:
        case, allowed = CASES[name], {*GOOD}
        for way in WAYS:
            folder = given.folder / f"{list(CASES).index(name)}-{way}"
            found = verdicts(case, way, folder, given.points or case.points)
            counts = Counter(found.values())
            table.append(f"| {name} | {way} | " + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |")
            bad += [f"{name}, {way}: {at}: {verdict}" for at, verdict in found.items() if verdict not in GOOD]
            worse |= way == "ours" and not {*found.values()} <= allowed
            allowed |= {*found.values()} & {*case.known}
    print("\n".join(["", *table, "", *bad]))
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
