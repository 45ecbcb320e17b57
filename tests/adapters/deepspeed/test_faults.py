"""A fault while a checkpoint is written costs that checkpoint only, and damaged files are named."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

LOOP = """
root = Path(sys.argv[1])
trained = engine(2, {**OURS, "rank_timeout": 3})
path, client = trained.load_checkpoint(root)
first = client["next"] if path else 0
say("resumed", [str(path), first])
"""


@pytest.mark.by_hand
def test_a_rank_that_is_killed(train: Any, said: Any, tmp_path: Path) -> None:
    # each rank in turn, in the write of its files and, for rank 0, before latest is replaced
    for number, (victim, point, nth) in enumerate([(1, "write", 1), (0, "store.rename", 3)]):
        done = train(
            2,
            LOOP
            + """
steps(trained, first, first + 2)
trained.save_checkpoint(root, client_state={"next": first + 2})
ours(trained).wait()
dist.barrier()
victim, point, nth = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if rank() == victim:
    arm(point, "kill", nth=nth)
losses = steps(trained, first + 2, first + 3)
trained.save_checkpoint(root, client_state={"next": first + 3})
ours(trained).saves[-1].wait()  # by the victim's end
end = lambda: os._exit(1)  # as a launcher ends all
""",
            tmp_path,
            victim,
            point,
            nth,
            may_fail=range(2),
        )
        assert done[victim].returncode == -signal.SIGKILL, done[victim].stderr
        assert said(done[0])["resumed"][1] == 2 * number  # what was complete before the last kill
        assert (tmp_path / "latest").read_text() == f"global_step{2 * number + 2}"
    assert list(tmp_path.rglob("*.partial-*"))
    done = train(
        2,
        LOOP
        + """
say("losses", steps(trained, first, first + 1))
trained.save_checkpoint(root, client_state={"next": first + 1})
trained.destroy()
""",
        tmp_path,
    )
    for process in done:
        assert said(process)["resumed"][1] == 4
    assert not list(tmp_path.rglob("*.partial-*")), "the debris of the killed runs is still there"
    assert (tmp_path / "latest").read_text() == "global_step5"


@pytest.mark.long
def test_a_full_disk(train: Any, tmp_path: Path) -> None:
    done = train(
        2,
        """
import errno
root = Path(sys.argv[1])
raising, warning = root / "raise", root / "warn"

for directory, entry in ((raising, OURS), (warning, {**OURS, "on_error": "warn"})):
    trained = engine(2, entry)
    steps(trained, 0, 1)
    trained.save_checkpoint(directory, tag="old")
    ours(trained).wait()
    with fault("write", "fail", errno.ENOSPC, on=1):
        trained.save_checkpoint(directory, tag="full")
        losses = steps(trained, 1, 3)
        ours(trained).saves[-1].wait()
    assert latest(directory) == "old"
    assert "rank 1" in str(ours(trained).saves[-1].exception) or rank() == 1
    raised = []
    for tag in ("next", "third", "fourth"):
        try:
            trained.save_checkpoint(directory, tag=tag)
        except Exception as error:
            raised.append((tag, str(error)))
        steps(trained, 3, 4)
    if directory == raising:
        (tag, text), = raised
        assert tag in ("next", "third") and "No space left" in text, raised
        say("raised", tag)
    else:
        assert not raised, raised
        assert ours(trained).failures == 1
    trained.destroy()
    dist.barrier()
    assert latest(directory) == "fourth", latest(directory)
    assert not list((directory / "full").glob("*.pt")), names(directory)
    assert not [name for name in names(directory) if "partial" in name], names(directory)
""",
        tmp_path,
    )
    tags = {re.search(r'"raised", "value": "(\w+)"', process.stdout).group(1) for process in done}  # type: ignore[union-attr]
    assert len(tags) == 1, "the ranks were not told at the same call"
    assert all("the checkpoint full has failed" in process.stderr for process in done)


@pytest.mark.by_hand
def test_a_disk_that_is_full_for_deepspeeds_own_files(train: Any, tmp_path: Path) -> None:
    # rank 0 alone writes these; if it raised in the middle of the call, the others would wait for it
    done = train(
        2,
        """
root = Path(sys.argv[1])
for on_error in ("raise", "warn"):
    directory = root / on_error
    trained = engine(2, {**OURS, "on_error": on_error})
    raised = []

    def save(tag):
        steps(trained, 0, 1)
        for call in (lambda: trained.save_checkpoint(directory, tag=tag), ours(trained).wait):
            try:
                call()
            except Exception as error:
                raised.append(str(error))

    save("old")
    script = directory / "zero_to_fp32.py"
    together(lambda: (script.unlink(), script.symlink_to("/dev/full")))
    save("full")
    together(script.unlink)
    blocked = root / f"{on_error} blocked"
    together(lambda: blocked.write_text("a file where the folder is to be"))
    directory, place = blocked / "ckpts", directory
    save("nowhere")
    directory = place
    save("new")
    if on_error == "warn":
        assert not raised, raised
        assert ours(trained).failures == 2
    else:
        full, nowhere = ([text for text in raised if word in text] for word in ("No space left", "ot a directory"))
        assert full and nowhere and len(full) + len(nowhere) == len(raised), raised
        assert all(str(directory) in text for text in full), full
    trained.destroy()
    dist.barrier()
    assert latest(directory) == "new"
    assert not list((directory / "full").glob("*.pt"))
""",
        tmp_path,
    )
    assert all("the checkpoint full has failed" in process.stderr for process in done)


@pytest.mark.by_hand
def test_damaged_files(train: Any, tmp_path: Path) -> None:
    train(
        1,
        """
root = Path(sys.argv[1])

trained = engine(2)
steps(trained, 0, 1)

def damaged(name, damage, *words):
    directory = root / str(len(list(root.iterdir())))
    trained.save_checkpoint(directory)
    ours(trained).wait()
    file = directory / "global_step1" / name
    file.write_bytes(damage(bytearray(file.read_bytes())))
    try:
        trained.load_checkpoint(directory)
    except Exception as error:
        for text in (str(file), *words):
            assert text in str(error), (text, type(error), str(error))
    else:
        raise AssertionError(f"{name}: loaded all the same")

def flipped(key):
    # one bit in the middle of a tensor's bytes
    def damage(data):
        data[data.index(key) + len(key) // 2] ^= 16
        return data
    return damage

def bytes_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

half = lambda data: data[: len(data) // 2]
frozen = bytes_of(trained.module.frozen.weight)
model, optimizer = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
damaged(model, flipped(frozen), "frozen.weight", "does not match its checksum")
damaged(model, half)
damaged(optimizer, half)
damaged(optimizer, lambda data: b"")
damaged(optimizer, lambda data: bytes(len(data)))
trained.destroy()
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_a_model_that_rank_0_cannot_save(train: Any, tmp_path: Path) -> None:
    """With ``save_16bit_model``, the other ranks must not wait for rank 0 until they time out."""
    train(
        2,
        """
from datastates.errors import DatastatesError

trained = engine(2)
steps(trained, 0, 1)
root = Path(sys.argv[1])
together(lambda: (root / "file").touch())

def fails(folder, error):
    begin = time.monotonic()
    try:
        trained.save_16bit_model(folder)
    except error as raised:
        said = str(raised)
    else:
        raise AssertionError("it did not fail")
    assert time.monotonic() - begin < 20, said
    return said

assert "File exists" in fails(root / "file", FileExistsError if rank() == 0 else DatastatesError)
with fault("write", "fail", 28):
    assert "No space left on device" in fails(root / "model", DatastatesError)
dist.barrier()
trained.save_16bit_model(root / "model")
assert names(root / "model") == ["pytorch_model.bin"]
trained.save_checkpoint(root / "checkpoints")
ours(trained).wait()
assert latest(root / "checkpoints") == "global_step1"
trained.destroy()
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_an_interface_that_is_not_known_is_refused_before_anything_is_saved(train: Any) -> None:
    train(
        1,
        """
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine.save_checkpoint = lambda self, path, tag=None: None
        try:
            engine()
            raise AssertionError("bound to what is not known")
        except RuntimeError as error:
            message = f"DeepSpeed {deepspeed.__version__}: DeepSpeedEngine.save_checkpoint takes (path, tag)"
            assert message in str(error), error
        """,
    )
