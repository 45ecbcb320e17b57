"""This package's strategy finds damage to the files of a checkpoint, and names it on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.by_hand
def test_a_flipped_byte_is_named_and_a_file_that_was_cut(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        directory, layout = Path(sys.argv[1]), Layout(tp=2)
        strategy = Ours.save()
        save(state(layout, 0), directory, strategy)
        (mine,) = [directory / n for n in files_of_ranks(directory) if n.startswith("__1_")]

        # the bytes of rank 1's part of one tensor; rank 0 does not need them
        data = plain(state(layout, 0))["moments"][0]
        offset = mine.read_bytes().find(data.contiguous().numpy().tobytes())
        assert offset > 0 or rank() == 0
        if rank() == 1:
            with mine.open("r+b") as file:
                file.seek(offset + 100)
                byte = file.read(1)
                file.seek(offset + 100)
                file.write(bytes([byte[0] ^ 1]))
        dist.barrier()
        error = CorruptError if rank() == 1 else CommitError
        with pytest.raises(error, match="exp_avg") as caught:
            load(state(layout), directory, Ours.load())
        assert "__1_" in str(caught.value) and (rank() == 1 or "rank 1" in str(caught.value)), caught.value
        # who does not need it does not read it
        loaded = load({"norm": state(layout)["norm"]}, directory, Ours.load())
        assert torch.equal(loaded["norm"], whole("norm", (WIDTH,), 0, torch.bfloat16))

        together(lambda: os.truncate(mine, mine.stat().st_size - 5))
        with pytest.raises(Exception, match="__1_"):
            load(state(layout), directory, Ours.load())
        together(mine.unlink)
        with pytest.raises(Exception, match="__1_"):
            load(state(layout), directory, Ours.load())
        """,
        tmp_path / "made",
    )


@pytest.mark.long
def test_what_does_not_fit_is_said(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        directory, layout = Path(sys.argv[1]), Layout(dp=2)
        save(state(layout, 0), directory, Ours.save())

        def wanted(key, *shape, **more):
            return {"x": ShardedTensor.from_rank_offsets(key, torch.ones(shape), replica_id=layout.place, **more)}

        with pytest.raises(Exception, match="shape mismatch"):
            load(wanted("exp_avg", 3, 3), directory, Ours.load())
        with pytest.raises(Exception, match="absent"):
            load(wanted("absent", 3, 3), directory, Ours.load())
        # where that is allowed, what is not stored is zero; as in Megatron's own
        for strategy in (Ours.load(), Stock.load()):
            found = load(wanted("exp_avg", WIDTH + 2, WIDTH, allow_shape_mismatch=True), directory, strategy)["x"]
            assert torch.equal(found[:WIDTH], whole("exp_avg", (WIDTH, WIDTH), 0)) and not found[WIDTH:].any()
        # another type: as in torch.distributed.checkpoint it is cast
        as_bf16 = {"x": ShardedTensor.from_rank_offsets("exp_avg", torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16),
                                                        replica_id=layout.place)}
        assert torch.equal(load(as_bf16, directory, Ours.load())["x"], whole("exp_avg", (WIDTH,) * 2, 0).bfloat16())
        """,
        tmp_path / "made",
    )
