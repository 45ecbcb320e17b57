"""Tensors in torch's files that consist of others: restored beside torch's ``load_state_dict``, and listed."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import Pair
from safetensors import safe_open

import datastates as ds
from datastates.cli import commands
from datastates.errors import FormatError, ProviderError, RestoreError, TrustError
from datastates.providers import from_state_dict, from_stateful

TRUST = ["composed.Pair"]


def _pair(seed: int, number: int = 1, *shape: int) -> Pair:
    torch.manual_seed(seed)
    return Pair(torch.randn(shape or (2, 3)), torch.randint(99, (2,)), number)


def _model(seed: int, number: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(3, 2))
    for layer in model[::2]:
        layer.weight = torch.nn.Parameter(_pair(seed, number), requires_grad=False)
    return model


def _parts(value: Any) -> Any:
    """A value, down to bytes that can be compared."""
    if isinstance(value, dict):
        return {key: _parts(item) for key, item in value.items()}
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return [type(value), str(context), *(_parts(getattr(value, name)) for name in names)]
    return (value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.fixture
def declared() -> Iterator[None]:
    """The class is declared to torch meanwhile, as torchao declares its own."""
    with torch.serialization.safe_globals([Pair]):
        yield


def _flat(model: Any, path: Path) -> None:
    torch.save(model.state_dict(), path)


def _nested(model: Any, path: Path) -> None:
    rest = {"args": argparse.Namespace(a=1), "sparse": torch.eye(2).to_sparse(), "pair": _pair(9, 7), "lr": 0.1}
    torch.save({"first": rest, "m": model.state_dict(), "last": [rest, _pair(8)]}, path)


def _renamed(model: Any, path: Path) -> None:
    torch.save({"net." + key.replace("0.", "zero."): v for key, v in model.state_dict().items()}, path)


WAYS: dict[str, tuple[Callable[[Any, Path], None], dict[str, Any]]] = {
    "flat": (_flat, {}),
    "nested": (_nested, {"strict": False}),
    "renamed": (_renamed, {"rename": {"net.zero.": "m/0.", "net.": "m/"}}),
}


@pytest.mark.parametrize("how", ["trusted", "declared", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_takes_them_as_from_torch_load(tmp_path: Path, way: str, how: str) -> None:
    save, options = WAYS[way]
    source, stock, live = _model(1), _model(2), _model(3)
    save(source, tmp_path / "s.pt")
    stock.load_state_dict(source.state_dict())
    weight = live[0].weight
    with torch.serialization.safe_globals([Pair] if how == "declared" else []):
        trust: Any = {"trusted": TRUST, "declared": (), "all": "all"}[how]
        result = ds.restore([from_stateful("m", live)], tmp_path / "s.pt", trust=trust, **options)
    assert _parts(live.state_dict()) == _parts(stock.state_dict()) == _parts(source.state_dict())
    assert live[0].weight is weight
    assert not result.missing_keys
    assert result.unexpected_keys == (["m/first/pair", "m/last/1"] if way == "nested" else [])


@pytest.mark.usefixtures("declared")
def test_torch_itself_loads_the_file_alike(tmp_path: Path) -> None:
    _flat(_model(1), tmp_path / "s.pt")
    stock, live = _model(2), _model(3)
    stock.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=True))
    ds.restore([from_stateful("m", live)], tmp_path / "s.pt")
    assert _parts(live.state_dict()) == _parts(stock.state_dict())
    assert _parts(ds.load(tmp_path / "s.pt")) == _parts(torch.load(tmp_path / "s.pt", weights_only=True))


@pytest.mark.usefixtures("declared")
def test_tensors_within_tensors(tmp_path: Path) -> None:
    def model(seed: int) -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_buffer("w", Pair(_pair(seed), _pair(seed + 1, 2, 4), 3))
        made.register_buffer("plain", torch.full((2,), float(seed)))
        return made

    _flat(model(1), tmp_path / "s.pt")
    live = model(5)
    ds.restore([from_stateful("m", live)], tmp_path / "s.pt")
    assert _parts(live.state_dict()) == _parts(model(1).state_dict())
    with ds.open(tmp_path / "s.pt") as opened:
        pairs = {f"~5:w/{one}/{other}" for one in ("first", "second") for other in ("first", "second")}
        assert set(opened) == {"plain", *pairs}


@pytest.mark.usefixtures("declared")
def test_a_selection(tmp_path: Path) -> None:
    source, live, before = _model(1), _model(3), _model(3)
    _flat(source, tmp_path / "s.pt")
    result = ds.restore([from_stateful("m", live)], tmp_path / "s.pt", keys="m/2.*")
    expected = {key: (source if key.startswith("2.") else before).state_dict()[key] for key in live.state_dict()}
    assert _parts(live.state_dict()) == _parts(expected)
    assert "m/0.weight" in result.left_out_keys


@pytest.mark.usefixtures("nothing_declared")
def test_what_is_not_trusted_is_named_before_anything_changes(tmp_path: Path) -> None:
    _nested(_model(1), tmp_path / "s.pt")
    live, before = _model(3), _parts(_model(3).state_dict())
    with pytest.raises(TrustError, match=r"an object of composed\.Pair, .*trust=\['composed\.Pair'\]") as caught:
        ds.restore([from_stateful("m", live)], tmp_path / "s.pt")
    assert caught.value.names == ("composed.Pair",)
    assert _parts(live.state_dict()) == before
    with pytest.raises(TrustError, match=r"argparse\.Namespace and of composed\.Pair") as caught:
        ds.load(tmp_path / "s.pt")
    assert caught.value.names == ("argparse.Namespace", "composed.Pair")


def test_the_package_that_declares_its_classes_is_named(tmp_path: Path) -> None:
    _flat(_model(1), tmp_path / "s.pt")
    script = "import sys, datastates as ds; ds.load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "s.pt"], capture_output=True, text=True)
    assert "trust=['composed.Pair'] if you trust this file, or import composed if it declares" in done.stderr


@pytest.mark.usefixtures("declared")
def test_another_description_is_refused_as_torch_refuses_it(tmp_path: Path) -> None:
    _flat(_model(1, number=4), tmp_path / "s.pt")
    with pytest.raises(RuntimeError, match="a Pair of 1 takes no 4"):
        _model(2).load_state_dict(torch.load(tmp_path / "s.pt"))
    with pytest.raises(ProviderError, match="a Pair of 1 takes no 4"):
        ds.restore([from_stateful("m", _model(2))], tmp_path / "s.pt")


@pytest.mark.usefixtures("declared")
def test_a_plain_tensor_takes_none(tmp_path: Path) -> None:
    _flat(_model(1), tmp_path / "s.pt")
    live = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(3, 2))
    with pytest.raises(
        RestoreError, match=r"'m/0\.weight': a Pair in the checkpoint, a tensor in the live state"
    ) as caught:
        ds.restore([from_stateful("m", live)], tmp_path / "s.pt")
    assert not caught.value.missing
    assert not caught.value.unexpected
    tree = {key: value.detach().clone() for key, value in live.state_dict().items()}
    with pytest.raises(RestoreError, match=r"'m/2\.weight': a Pair in the checkpoint, a tensor in the live state"):
        ds.restore([from_state_dict("m", tree)], tmp_path / "s.pt")
    with pytest.raises(RestoreError, match=r"'m/0\.weight': the live tensor is no plain memory"):
        ds.restore([from_state_dict("m", _model(2).state_dict())], tmp_path / "s.pt")


@pytest.mark.usefixtures("declared")
def test_keys_that_only_one_side_has_are_those_of_the_tensors(tmp_path: Path) -> None:
    source = _model(1)
    torch.save({**source.state_dict(), "9.weight": _pair(1)}, tmp_path / "more.pt")
    with pytest.raises(RestoreError) as caught:
        ds.restore([from_stateful("m", _model(2))], tmp_path / "more.pt")
    assert (caught.value.missing, caught.value.unexpected) == ([], ["m/9.weight"])
    torch.save({k: v for k, v in source.state_dict().items() if k != "2.weight"}, tmp_path / "less.pt")
    with pytest.raises(RestoreError) as caught:
        ds.restore([from_stateful("m", _model(2))], tmp_path / "less.pt")
    assert (caught.value.missing, caught.value.unexpected) == (["m/2.weight"], [])
    live = _model(2)
    result = ds.restore([from_stateful("m", live)], tmp_path / "less.pt", strict=False)
    assert result.missing_keys == ["m/2.weight"]
    assert _parts(live[0].weight) == _parts(source[0].weight)
    assert _parts(live[2].weight) == _parts(_model(2)[2].weight)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("where", ["beside", "in the description"])
def test_no_code_of_a_file_runs(tmp_path: Path, where: str) -> None:
    mark = tmp_path / "boom"
    model, live = _model(1), _model(2)
    state = model.state_dict()
    if where == "beside":
        torch.save({"m": state, "bomb": [Bomb(mark)]}, tmp_path / "s.pt")
        ds.restore([from_stateful("m", live)], tmp_path / "s.pt", trust=TRUST)
        assert _parts(live.state_dict()) == _parts(state)
    else:
        state["0.weight"].note = {"deep": [Bomb(mark)]}
        torch.save(state, tmp_path / "s.pt")
        before = _parts(live.state_dict())
        with pytest.raises(TrustError, match=r"builtins\.exec") as caught:
            ds.restore([from_stateful("m", live)], tmp_path / "s.pt", trust=TRUST)
        assert caught.value.names == ("builtins.exec",)
        assert _parts(live.state_dict()) == before
    with ds.open(tmp_path / "s.pt") as opened:
        assert len(list(opened.items())) >= 4
    ds.export(tmp_path / "s.pt", tmp_path / "out")
    commands.main(["inspect", str(tmp_path / "s.pt")])
    assert not mark.exists()


def test_a_class_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _flat(_model(1), tmp_path / "s.pt")
    live = _model(2)
    monkeypatch.delattr("composed.Pair")
    with pytest.raises(FormatError, match=r"composed\.Pair is trusted but cannot be imported"):
        ds.restore([from_stateful("m", live)], tmp_path / "s.pt", trust="all")


def test_names_are_those_of_our_own_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _model(1)
    _flat(model, tmp_path / "s.pt")
    ds.snapshot([from_stateful("m", model)], tmp_path / "c").wait_committed()
    found = []
    for source in ("s.pt", "c"):
        ds.export(tmp_path / source, tmp_path / f"{source}.safetensors")
        with safe_open(tmp_path / f"{source}.safetensors", "pt") as file:
            found.append({key: _parts(file.get_tensor(key)) for key in file.keys()})  # noqa: SIM118 - no mapping
    assert found[0] == found[1]
    assert {"0.weight.first", "0.weight.second", "0.bias"} < found[0].keys()
    with ds.open(tmp_path / "s.pt") as opened:
        assert torch.equal(opened["~5:0.weight/first"], model[0].weight.first)
    assert commands.main(["diff", str(tmp_path / "s.pt.safetensors"), str(tmp_path / "c.safetensors")]) == 0
    capsys.readouterr()
    assert commands.main(["verify", str(tmp_path / "s.pt")]) == 0


@pytest.mark.parametrize("name", ["Int8WeightOnly", "Float8WeightOnly", "IntxWeightOnly"])
def test_weights_of_torchao(tmp_path: Path, name: str) -> None:
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed: its weights were NOT tried"
    )

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        made = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)).to(torch.bfloat16)
        quantization.quantize_(made, getattr(quantization, f"{name}Config")())
        return made

    torch.save({"model": model(1).state_dict(), "args": argparse.Namespace(a=1)}, tmp_path / "s.pt")
    stock, live = model(2), model(3)
    stock.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=False)["model"])
    ds.restore([from_stateful("model", live)], tmp_path / "s.pt")
    assert _parts(live.state_dict()) == _parts(stock.state_dict()) == _parts(model(1).state_dict())


@pytest.mark.parametrize("index", [False, True])
def test_a_folder_of_hugging_face(tmp_path: Path, index: bool) -> None:
    source = _model(1)
    folder = tmp_path / "folder"
    folder.mkdir()
    if index:
        state = source.state_dict()
        first = {key: value for key, value in state.items() if key < "2"}
        torch.save(first, folder / "pytorch_model-00001-of-00002.bin")
        torch.save({k: v for k, v in state.items() if k not in first}, folder / "pytorch_model-00002-of-00002.bin")
        names = {key: f"pytorch_model-0000{1 if key in first else 2}-of-00002.bin" for key in state}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        torch.save(source.state_dict(), folder / "pytorch_model.bin")
    live = _model(2)
    ds.restore([from_stateful("m", live)], folder, trust=TRUST)
    assert _parts(live.state_dict()) == _parts(source.state_dict())
    assert _parts(ds.load(folder, trust=TRUST)) == _parts(dict(source.state_dict()))
    with pytest.raises(TrustError, match=r"composed\.Pair"):
        ds.load(folder)
    with pytest.raises(ImportError, match=r"'0\.weight' is built by torch only"):
        ds.load(folder, trust=TRUST, framework="np")
    assert commands.main(["verify", str(folder)]) == 0


@pytest.mark.parametrize("rename", [{"m/": "n/"}, {"m/0.": "n/0.", re.compile("^m/"): "n/"}])
def test_our_own_checkpoint_under_other_names(tmp_path: Path, rename: Any) -> None:
    source, live = _model(1), _model(2)
    other = {"state": {"0": _pair(5)}, "sparse": torch.eye(2).to_sparse()}
    ds.snapshot([from_stateful("m", source), from_state_dict("d", other)], tmp_path / "c").wait_committed()
    with pytest.raises(TrustError, match=r"composed\.Pair"):
        ds.restore([from_stateful("n", live)], tmp_path / "c", rename=rename)
    assert _parts(live.state_dict()) == _parts(_model(2).state_dict())
    result = ds.restore([from_stateful("n", live)], tmp_path / "c", rename=rename, trust=TRUST)
    assert _parts(live.state_dict()) == _parts(source.state_dict())
    assert not result.missing_keys + result.unexpected_keys
    plain = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(3, 2))
    with pytest.raises(RestoreError, match=r"'n/0\.weight': a Pair in the checkpoint") as caught:
        ds.restore([from_stateful("n", plain)], tmp_path / "c", rename=rename, trust=TRUST)
    assert not caught.value.missing + caught.value.unexpected


def test_a_single_weight_under_another_name(tmp_path: Path) -> None:
    source, live = _model(1), _model(2)
    ds.snapshot([from_stateful("m", source)], tmp_path / "c").wait_committed()
    names = {"m/0.": "n/2.", "m/2.": "n/0.", "m/": "n/"}
    ds.restore([from_stateful("n", live)], tmp_path / "c", rename=names, trust=TRUST)
    assert _parts(live[2].weight) == _parts(source[0].weight)
    assert _parts(live[0].weight) == _parts(source[2].weight)
