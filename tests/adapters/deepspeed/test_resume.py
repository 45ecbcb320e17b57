"""A resumed run goes on bit for bit like the run that never stopped, whichever engine wrote its checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.long

LONG = ["0-fp32", "1-bf16", "3-bf16"]
CASES = [
    *LONG,
    *(pytest.param(c, marks=pytest.mark.by_hand) for c in ("0-bf16", "1-fp32", "2-bf16", "2-fp32", "3-fp32")),
]
PAIRS = ("torch ours", "ours torch", "ours ours")  # who wrote, and who reads
SEVERAL = """
root = Path(sys.argv[1])
cases = sys.argv[2:]
"""
SAVE = (
    SEVERAL
    + """
for case in cases:
    stage, dtype = case.split("-")
    for writer, entry in (("torch", TORCH), ("ours", OURS)):
        trained = engine(int(stage), entry, dtype)
        steps(trained, 0, 3)
        trained.save_checkpoint(root / case / writer, client_state={"next": 3, "text": "π"})
        losses = steps(trained, 3, 6)
        say(f"{case} {writer}", [losses, state(trained)])
        trained.destroy()
"""
)
RESUME = (
    SEVERAL
    + """
for case in cases:
    stage, dtype = case.split("-")
    for writer, reader, entry in (("torch", "ours", OURS), ("ours", "torch", TORCH), ("ours", "ours", OURS)):
        trained = engine(int(stage), entry, dtype)
        path, client = trained.load_checkpoint(root / case / writer)
        assert Path(path).parent == root / case / writer / "global_step3", path
        assert client["text"] == "π", client
        losses = steps(trained, client["next"], 6)
        say(f"{case} {writer} {reader}", [losses, state(trained)])
        trained.destroy()
    if rank() == 0:
        theirs, made = root / case / "torch", root / case / "ours"
        say(f"{case} names", [names(theirs), names(made)])
        files = [name for name in names(theirs) if name.endswith(".pt")]
        say(f"{case} files", {name: differences(content(theirs / name), content(made / name)) for name in files})
"""
)
# the checkpoint's files include the JSON file, which names the engine that saves
OWN = "/ds_config"


@pytest.fixture(scope="module")
def runs(
    module_train: Any, said: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[list[Any], list[Any]]:
    """What each rank said in the runs that never stopped, and in those that were resumed, for all requested cases."""
    root = tmp_path_factory.mktemp("resume")
    asked = [vars(item).get("callspec") for item in request.session.items if item.path == request.path]
    cases = sorted({call.params["case"] for call in asked if call} or LONG)
    return [*map(said, module_train(2, SAVE, root, *cases))], [*map(said, module_train(2, RESUME, root, *cases))]


@pytest.mark.by_hand
@pytest.mark.parametrize("case", CASES)
def test_whoever_writes_and_reads_training_goes_on_alike(runs: Any, case: str) -> None:
    saved, resumed = runs
    for rank in range(2):
        never_stopped = saved[rank][f"{case} torch"]
        assert saved[rank][f"{case} ours"] == never_stopped
        for pair in PAIRS:
            losses, state = resumed[rank][f"{case} {pair}"]
            assert losses == never_stopped[0], pair
            assert state == never_stopped[1], pair


@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_of_torch(runs: Any, case: str) -> None:
    _, resumed = runs
    theirs, ours = resumed[0][f"{case} names"]
    assert ours == theirs
    for name, different in resumed[0][f"{case} files"].items():
        assert [line for line in different if not line.startswith(OWN)] == [], name
