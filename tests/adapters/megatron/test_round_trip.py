"""One layout of ranks loads what another saved, and stock Megatron-Core and this package read each other's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PAIRS = [("Ours", "Ours"), ("Ours", "Stock"), ("Stock", "Ours")]


@pytest.mark.by_hand
def test_between_layouts_of_two_ranks(run: Any, tmp_path: Path) -> None:
    run(
        2,
        f"""
        layouts = [Layout(tp=2), Layout(pp=2), Layout(dp=2)]
        writers = {{"Ours": Ours.save(), "Stock": Stock.save()}}
        readers = {{"Ours": Ours.load(), "Stock": Stock.load()}}
        for writer, reader in {PAIRS}:
            for step, saved in enumerate(layouts):
                directory = Path(sys.argv[1]) / f"{{writer}}-{{reader}}-{{step}}"
                save(state(saved, step, own=True), directory, writers[writer])
                assert finished(directory)
                for wanted in layouts:
                    loaded_as(wanted, step, directory, readers[reader], own=wanted == saved)
        """,
        tmp_path,
    )


@pytest.mark.by_hand
@pytest.mark.long
def test_from_two_ranks_to_one_and_back(run: Any, tmp_path: Path) -> None:
    layouts = ["tp=2", "pp=2", "dp=2"]
    run(
        2,
        f"""
        for layout in {layouts}:
            for writer in (Ours, Stock):
                save(state(eval(f"Layout({{layout}})"), 3), Path(sys.argv[1]) / layout / writer.__name__, writer.save())
        """,
        tmp_path,
    )
    run(
        1,
        f"""
        directory = Path(sys.argv[1])
        for writer, reader in {PAIRS}:
            for layout in {layouts}:
                loaded_as(Layout(), 3, directory / layout / writer, globals()[reader].load())
        for writer in (Ours, Stock):
            save(state(Layout(), 4), directory / "one" / writer.__name__, writer.save())
        """,
        tmp_path,
    )
    run(
        2,
        f"""
        for writer, reader in {PAIRS}:
            for layout in {layouts}:
                loaded_as(eval(f"Layout({{layout}})"), 4, Path(sys.argv[1]) / "one" / writer, globals()[reader].load())
        """,
        tmp_path,
    )


@pytest.mark.long
def test_columns_are_read_and_damage_in_them_is_found(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        matrix = torch.arange(1 << 22, dtype=torch.float32).reshape(4096, 1024) + 1

        def sharded(dim, whole):
            part = whole.chunk(2, dim)[rank()].contiguous()
            return {"w": ShardedTensor.from_rank_offsets("w", part, (dim, rank(), 2))}

        directory, reader = Path(sys.argv[1]) / "rows", Ours.load()
        save(sharded(0, matrix), directory, Ours.save())
        found = load(sharded(1, torch.zeros_like(matrix)), directory, reader)
        assert torch.equal(found["w"], matrix.chunk(2, 1)[rank()])
        assert reader.tally.needed_nbytes == 1 << 23
        assert reader.tally.read_nbytes - reader.tally.shared_nbytes < 1.1 * (1 << 23), reader.tally

        damaged = files_of_ranks(directory)[0]

        def flip():
            with (directory / damaged).open("r+b") as file:
                file.seek(1 << 20)
                byte = file.read(1)
                file.seek(1 << 20)
                file.write(bytes([byte[0] ^ 1]))

        together(flip)
        with pytest.raises((CorruptError, CommitError), match=damaged):
            load(sharded(1, torch.zeros_like(matrix)), directory, reader)
        """,
        tmp_path,
    )


# a persistent worker imports Megatron-Core anew
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.by_hand)])
def test_asynchronous(run: Any, tmp_path: Path, persistent: bool) -> None:
    run(
        2,
        f"""
        directory, layout, strategy = Path(sys.argv[1]), Layout(tp=2), Ours.save()
        queue = AsyncCallsQueue(persistent={persistent})
        for step in range(3):
            request = save(state(layout, step), directory / str(step), strategy, async_sharded_save=True)
            queue.schedule_async_request(request)
            assert not finished(directory / str(step))
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
        for step in range(3):
            assert finished(directory / str(step))
            loaded_as(layout, step, directory / str(step), Stock.load())
            loaded_as(layout, step, directory / str(step), Ours.load())
        request = save(state(layout, 3), directory / "3", strategy, async_sharded_save=True)
        queue.schedule_async_request(request)
        wait_for(lambda: queue.maybe_finalize_async_calls(blocking=False) == [3], "the end of the save")
        loaded_as(layout, 3, directory / "3", Stock.load())
        queue.close()
        """,
        tmp_path,
    )


def test_a_request_executed_synchronously(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        directory, layout = Path(sys.argv[1]) / "iter_0000007", Layout(dp=2)
        strategy = Ours.save()
        save(state(layout, 7), directory, strategy, async_sharded_save=True).execute_sync()
        assert finished(directory)
        assert strategy.last.step == 7
        loaded_as(layout, 7, directory, None)
        strategy.close()
        save(state(layout, 8), directory.with_name("iter_0000008"), strategy)
        loaded_as(layout, 8, directory.with_name("iter_0000008"), Ours.load())
        """,
        tmp_path,
    )
