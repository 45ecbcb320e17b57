"""Tell the story in four processes: one that trains, one that is killed, and one that resumes; this one looks."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import datastates as ds
from datastates.cli import commands
from datastates.demo.training import EVERY, KILLED, STEPS, Trained, make_model, train


def _run(directory: Path, *options: str, status: int = 0) -> str:
    """Train in a new process; returns what it prints. Exits where it does not end with the status."""
    command = [sys.executable, "-m", "datastates.demo", "--train", str(directory), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # several threads would wait long on a busy machine
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != status:
        sys.exit(f"the training ended with status {done.returncode}, and should have ended with {status}")
    return done.stdout


def _look_inside(directory: Path) -> None:
    with ds.open(directory) as checkpoint:
        print(f"\nInside are {len(checkpoint)} arrays. Each is read and verified when it is asked for:")
        for key, array in itertools.islice(checkpoint.items(), 3):
            print(f"  {key}  {array.dtype}  {tuple(array.shape)}")
    print("The commands `datastates inspect`, `verify`, `diff` and `export` say more of such a directory.")


def _tell(scratch: Path) -> None:
    whole, killed = scratch / "whole", scratch / "killed"
    print(f"Training {STEPS} steps without interruption, a checkpoint every {EVERY} …", flush=True)
    reference = Trained(**json.loads(_run(whole)))
    stall = 1e3 * statistics.median(reference.stalls)
    print(f"For each checkpoint of {reference.nbytes / 1e6:.0f} MB it waited {stall:.1f} ms.\n")
    print(f"Training again, and killing it while it writes the checkpoint of step {KILLED} …", flush=True)
    _run(killed, "--kill", status=-signal.SIGKILL)
    commands.main(["ls", str(killed)])
    print("\nResuming …", flush=True)
    resumed = Trained(**json.loads(_run(killed)))
    if resumed.losses != reference.losses:
        sys.exit("the losses differ")
    final = float.fromhex(resumed.losses[str(STEPS)])
    print(f"Resumed at step {resumed.start}; all {STEPS} losses equal to the last bit (the last is {final:.4f}).")
    _look_inside(killed)


def main() -> None:
    """Tell the story, or be one of its processes."""
    parser = argparse.ArgumentParser(prog="python -m datastates.demo", description=__doc__)
    parser.add_argument("--train", type=Path, metavar="DIR", help="only train, with checkpoints in DIR; prints JSON")
    parser.add_argument("--kill", action="store_true", help="with --train: die in the middle of a checkpoint")
    arguments = parser.parse_args()
    if arguments.train is not None:
        print(json.dumps(dataclasses.asdict(train(make_model(), arguments.train, killed=arguments.kill))))
        return
    with tempfile.TemporaryDirectory(prefix="datastates-demo-") as scratch:
        _tell(Path(scratch))


if __name__ == "__main__":
    main()
