"""Run the benchmarks: ``python benchmarks/run.py cpu|gpu|scale``. Prints medians, and writes every sample as JSON.

The package that is measured is the installed one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

_BUILD = Path("build")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=("cpu", "gpu", "scale"))
    parser.add_argument("--tiny", action="store_true", help="a few MB instead of GB: does it run, not how fast")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these benchmarks only")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default 5)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S", help="begin no further rounds after this long"
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where files go (default: below build/)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write (default: build/SUITE.json)")
    return parser.parse_args()


def main() -> int:
    """Run a suite; returns 1 if something other than a peer failed."""
    arguments = _arguments()
    # imported here, as torch_checkpointing's process imports this module again and needs none of this
    from peers import is_peer
    from suite import run_suite

    begin = time.monotonic()
    json_path = arguments.json or _BUILD / f"{arguments.suite}.json"
    json_path.parent.mkdir(parents=True, exist_ok=True)
    parent = arguments.directory or _BUILD
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="benchmarks-") as directory:
        failed = False
        for report in run_suite(
            arguments.suite,
            Path(directory).absolute(),
            tiny=arguments.tiny,
            only=arguments.only,
            repeat=arguments.repeat,
            until=begin + arguments.seconds,
        ):
            # written after every benchmark, so that a suite that is stopped leaves its samples
            json_path.write_text(json.dumps(report, indent=1) + "\n")
            failed = not all(is_peer(name) for one in report["benchmarks"].values() for name in one["errors"])
    print(f"{time.monotonic() - begin:.0f} s; samples in {json_path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
