"""How Megatron-Core uses the strategies, and what they leave in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long


def test_they_are_used_and_not_replaced(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        from datastates.container import archive

        directory, layout = Path(sys.argv[1]), Layout(dp=2)
        strategy, reader = Ours.save(), Ours.load()
        save(state(layout, 0), directory, strategy)
        assert strategy.last.committed and strategy.last.report.state == "committed"
        # replicas are written once, and a rank without a part leaves no file
        assert files_of_ranks(directory) == ["__0_0.distcp"], names(directory)
        assert archive.is_ending((directory / "__0_0.distcp").read_bytes()[-4096:])
        assert json.loads((directory / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
        loaded_as(layout, 0, directory, reader)
        assert reader.tally is not None
        assert reader.cached_global_metadata.state_dict_metadata.keys() >= {"norm", "decoder.weight"}

        # without replica_id as well
        other = directory.with_name("all")
        save(state(layout, 3), other, Ours.save(keep_only_main_replica=False))
        loaded_as(layout, 3, other, Stock.load())
        sizes = [sum((where / name).stat().st_size for name in files_of_ranks(where)) for where in (directory, other)]
        assert sizes[1] < 1.3 * sizes[0], sizes

        # what is there is replaced, at once and wholly
        save(state(layout, 1), directory, strategy)
        loaded_as(layout, 1, directory, reader)
        assert files_of_ranks(directory) == ["__0_1.distcp"], names(directory)
        """,
        tmp_path / "made",
    )


def test_fully_parallel(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        directory, layout = Path(sys.argv[1]), Layout(dp=2)
        strategy = FullyParallelSaveStrategyWrapper(Ours.save(), None, True)
        queue = AsyncCallsQueue()
        for step in range(2):
            save(state(layout, step), directory / str(step), strategy)
        queue.schedule_async_request(save(state(layout, 2), directory / "2", strategy, async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)
        for step in range(3):
            where = directory / str(step)
            sizes = [(where / name).stat().st_size for name in files_of_ranks(where)]
            assert len(sizes) == 2 and max(sizes) < 2 * min(sizes), "the replicas were not shared out"
            loaded_as(layout, step, where, Stock.load())
            loaded_as(Layout(tp=2), step, where, Ours.load())
            for base in (Ours.load(), Stock.load()):
                reader = FullyParallelLoadStrategyWrapper(base, exchange_algo="gather_object")
                loaded_as(layout, step, where, reader)
            assert reader.cached_global_metadata is None or reader.cached_global_metadata.state_dict_metadata
        reader = Ours.load()
        loaded_as(layout, 0, directory / "0", FullyParallelLoadStrategyWrapper(reader, exchange_algo="gather_object"))
        """,
        tmp_path,
    )


def test_metadata_and_strictness(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        directory, layout = Path(sys.argv[1]), Layout(tp=2)
        save(state(layout, 0), directory, Ours.save(), content_metadata={"kind": "test"})
        assert dist_checkpointing.load_content_metadata(str(directory)) == {"kind": "test"}
        assert dist_checkpointing.load_common_state_dict(str(directory))["iteration"] == 0
        described = [dist_checkpointing.load_tensors_metadata(str(directory), s) for s in (Ours.load(), Stock.load())]
        assert {k: (t.global_shape, t.dtype) for k, t in described[0].items()} == {
            k: (t.global_shape, t.dtype) for k, t in described[1].items()
        }
        assert described[0]["uneven"].global_shape == (10, 7)
        whole_tensors = dist_checkpointing.load_plain_tensors(str(directory))
        assert torch.equal(whole_tensors["exp_avg"], whole("exp_avg", (WIDTH, WIDTH), 0))

        asked = state(layout)
        asked["more"] = ShardedTensor.from_rank_offsets("more", torch.zeros(3), replica_id=rank())
        del asked["norm"]
        loaded, missing, unexpected = load(asked, directory, Ours.load(), strict="return_all")
        assert missing >= {"norm"} and unexpected == {"more"}, (missing, unexpected)
        assert torch.equal(loaded["moments"][0], plain(state(layout, 0))["moments"][0])
        """,
        tmp_path / "made",
    )


def test_a_second_save_is_planned_in_one_exchange(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        from datastates.ranks.board_world import BoardWorld

        asked, agree = [], BoardWorld.agree
        BoardWorld.agree = lambda self, name, *rest, **more: (asked.append(name), agree(self, name, *rest, **more))[1]
        strategy = Ours.save()
        for step in range(3):
            save(state(Layout(tp=2), step), Path(sys.argv[1]) / str(step), strategy)
        assert [name.split("/")[-1] for name in asked] == ["digests", "plans", "commit", *["digests", "commit"] * 2]
        """,
        tmp_path,
    )


def test_tensors_of_every_kind(run: Any, tmp_path: Path) -> None:
    run(
        2,
        """
        class Quantized(torch.Tensor):
            # as Transformer Engine's: of one type to see, of another in memory

            @staticmethod
            def __new__(cls, values):
                return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

            def __init__(self, values):
                self.values = values

            def detach(self):
                return self

            def dequantize(self):
                return self.values.bfloat16() * 2

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                raise NotImplementedError(func)

        values = torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn)
        base = torch.arange(200.0).reshape(10, 20)
        one_place = torch.arange(6.0)
        made = {
            "quantized": Quantized(values),
            "float8": values,
            "transposed": base.t(),
            "sparse": base[:, ::7],
            "bool": torch.tensor([True, False]),
            "int": torch.tensor(3),
            "as_rows": one_place.reshape(2, 3),
            "as_columns": one_place.reshape(3, 2),
            "again": one_place.reshape(2, 3),
        }
        big = torch.zeros(300, 600)
        made["view"] = big.t()[:, :250]

        def sharded(tensors):
            return {
                key: ShardedTensor.from_rank_offsets(key, tensor, (0, rank(), 2), prepend_axis_num=1)
                for key, tensor in tensors.items()
            }

        directory = Path(sys.argv[1])
        before = {key: tensor for key, tensor in made.items()}
        given = sharded(made)
        save(given, directory, Ours.save())
        assert all(given[key].data is tensor for key, tensor in before.items()), "what was given was changed"
        expected = {**made, "quantized": made["quantized"].dequantize()}
        for strategy in (Ours.load(), Stock.load()):
            found = load(sharded({k: torch.empty_like(t) for k, t in expected.items()}), directory, strategy)
            for key, tensor in expected.items():
                assert found[key].dtype == tensor.dtype and torch.equal(found[key].float(), tensor.float()), key
        """,
        tmp_path / "made",
    )


def test_training_scripts(run: Any, tmp_path: Path) -> None:
    """``install`` works in modules that make strategies as ``megatron.training.checkpointing`` does, old and new."""
    run(
        2,
        """
        from types import ModuleType
        from datastates.errors import SettingsError

        old, new = ModuleType("up_to_0_16"), ModuleType("from_0_17_on")
        old.get_default_save_sharded_strategy = lambda backend="torch_dist", version=1: None
        old.get_default_load_sharded_strategy = lambda checkpoint_dir: None
        new.TorchDistSaveShardedStrategy = TorchDistSaveShardedStrategy
        new.TorchDistLoadShardedStrategy = TorchDistLoadShardedStrategy
        with pytest.raises(SettingsError, match="host_cash"):
            install(old, host_cash=1)
        with pytest.raises(RuntimeError, match="datastates._base.faults makes"):
            install(sys.modules["setting"].faults)
        install(old, host_cache="32MiB")
        install(new)
        directory, layout = Path(sys.argv[1]), Layout(dp=2)
        made = [
            (old.get_default_save_sharded_strategy("torch_dist"), old.get_default_load_sharded_strategy("x")),
            (new.TorchDistSaveShardedStrategy(cpu_shm_mode=False), new.TorchDistLoadShardedStrategy(True)),
        ]
        for number, (writer, reader) in enumerate(made):
            assert isinstance(writer, DataStatesSaveStrategy) and isinstance(reader, DataStatesLoadStrategy)
            writer.use_cached_ckpt_structure = True  # what scripts do with them
            wrapped = FullyParallelSaveStrategyWrapper(writer, dist.group.WORLD, True)
            save(state(layout, number), directory / str(number), wrapped)
            assert writer.last.committed
            wrapped = FullyParallelLoadStrategyWrapper(reader, exchange_algo="gather_object")
            loaded_as(layout, number, directory / str(number), wrapped)
        with pytest.raises(ValueError, match="msc:"):
            writer.save({}, "msc://bucket/x")
        with pytest.raises(ValueError, match="msc:"):
            reader.load({}, "msc://bucket/x")
        assert made[0][0] is old.get_default_save_sharded_strategy("torch_dist")
        """,
        tmp_path,
    )
