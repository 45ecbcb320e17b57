"""A process ends well, or forks, while a store is asked for bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import atexit, os, sys, threading
support, root = sys.argv[1:]
sys.path.insert(0, support)
import numpy as np
import datastates as ds
from datastates.providers import HostTensorProvider
from datastates.storage import Location, Traits, register
from memory_store import MemoryStore

array = np.arange(1 << 20)
ds.snapshot([HostTensorProvider("s", {"t": array})], root + "/one").wait_committed()

class Slow(MemoryStore):
    traits = Traits(best_piece=64 << 10)
    asked, go_on = threading.Event(), threading.Event()
    def read_into(self, path, spans):
        self.asked.set()
        self.go_on.wait()
        super().read_into(path, spans)

store = Slow()
for name in os.listdir(root + "/one"):
    with open(f"{root}/one/{name}", "rb") as file:
        store.create(Location("mem://b/one") / name, file.read())
register("mem", store)
"""


@pytest.mark.long
@pytest.mark.parametrize("daemon", [True, False])
def test_a_process_ends_while_a_store_is_asked(daemon: bool, tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""{SCRIPT}
def load():
    assert (ds.load("mem://b/one")["s"]["t"] == array).all()
    print("loaded")
threading.Thread(target=load, daemon={daemon}).start()
store.asked.wait()
if {daemon}:
    atexit.register(store.go_on.set)
else:
    store.go_on.set()
"""
    ended = run("-c", script, Path(__file__).parents[1] / "support", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert daemon or ended.stdout == "loaded\n"


def test_after_the_end_nothing_is_asked_for(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""
import atexit
def load():
    try:
        ds.load("mem://b/one")
    except ds.errors.StorageError as error:
        print(error)
atexit.register(load)
{SCRIPT}
store.go_on.set()
"""
    ended = run("-c", script, Path(__file__).parents[1] / "support", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "read mem://b/one/rank-00000.pt: Python is ending\n"


def test_a_forked_child_reads_on_its_own(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""{SCRIPT}
opened = ds.open("mem://b/one")
reading = threading.Thread(target=lambda: opened["s/t"])
reading.start()
store.asked.wait()
if os.fork() == 0:
    store.go_on = threading.Event()
    store.go_on.set()
    assert (ds.load("mem://b/one")["s"]["t"] == array).all()
    print("read")
    sys.exit(0)
assert os.wait()[1] == 0
store.go_on.set()
reading.join()
assert (opened["s/t"] == array).all()
"""
    ended = run("-W", "ignore", "-c", script, Path(__file__).parents[1] / "support", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "read\n"


@pytest.mark.long
def test_garbage_is_collected_in_a_thread_that_reads_for_it(tmp_path: Path, run: Callable[..., Any]) -> None:
    script = f"""{SCRIPT}
import gc
from datastates.config import IoSettings
from datastates.container.file import open_container
from datastates.executor.make import make_executor
from datastates.reading.reads import Reads
from datastates.state import arrays

class Left:
    pass
def leave():
    left = Left()
    left.itself, left.reads, left.array = left, Reads(in_full=True), np.empty(1 << 20)
    left.executor = make_executor(IoSettings(host_cache=4 << 20, block=1 << 20))
    left.reads.add_memory(source, int(source.data_offset[0]), arrays.memory(left.array))
    left.reads.start(left.executor)

source = open_container(Location("mem://b/one/rank-00000.pt"))
collected, read_into = threading.Event(), Slow.read_into
def collect(self, path, spans):
    self.asked.set()
    self.go_on.wait()
    gc.collect()
    collected.set()
    MemoryStore.read_into(self, path, spans)
Slow.read_into = collect
gc.disable()
leave()
store.asked.wait()
store.go_on.set()
collected.wait()
assert (ds.load("mem://b/one")["s"]["t"] == array).all()
print("loaded")
"""
    ended = run("-c", script, Path(__file__).parents[1] / "support", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "loaded\n", "")
