"""A tensor that is read when it is used is that tensor, and no more of it is read than is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import datastates as ds
from datastates.providers import from_state_dict
from datastates.reading.checkpoint import Checkpoint
from datastates.serving.unread import Unread

WHOLE = torch.arange(8 * 6 * 4, dtype=torch.bfloat16).reshape(8, 6, 4)


class Noting(Checkpoint):
    """Notes the elements that are read."""

    read: list[int]

    def part(self, key: str, index: Any) -> Any:
        found = super().part(key, index)
        self.read.append(found.numel())
        return found

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        self.read.append(found.numel())
        return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Noting]:
    path = tmp_path_factory.mktemp("saved") / "c"
    ds.snapshot([from_state_dict("m", {"w": WHOLE})], path).wait_committed()
    with ds.open(path) as checkpoint:
        checkpoint.__class__ = Noting
        assert isinstance(checkpoint, Noting)
        yield checkpoint


@pytest.fixture
def unread(opened: Noting) -> Unread:
    opened.read = []
    return Unread.of(opened, "m/w")


def test_it_is_described_without_reading(opened: Noting, unread: Unread) -> None:
    assert (unread.shape, unread.dtype, unread.ndim) == (WHOLE.shape, WHOLE.dtype, 3)
    assert unread.device == WHOLE.device
    assert (unread.size(), unread.size(1), unread.dim(), unread.numel(), len(unread)) == (WHOLE.shape, 6, 3, 192, 8)
    assert opened.read == []


@given(st.data())
def test_cuts_of_cuts_are_read_alone(opened: Noting, data: st.DataObject) -> None:
    opened.read = []
    cut: Any = Unread.of(opened, "m/w")
    expected = WHOLE
    for _ in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.integers(-3, 2))
        start = data.draw(st.integers(0, expected.shape[dim]))
        length = data.draw(st.integers(0, expected.shape[dim] - start))
        if data.draw(st.booleans()):
            start = start - expected.shape[dim] if start < expected.shape[dim] and data.draw(st.booleans()) else start
            cut, expected = cut.narrow(dim, start, length), expected.narrow(dim, start, length)
        else:
            index = [slice(None)] * 3
            index[dim] = slice(start, start + length)
            cut, expected = cut[tuple(index)], expected[tuple(index)]
        assert type(cut) is Unread
        assert cut.shape == expected.shape
    assert opened.read == []
    target = torch.zeros(expected.shape)
    target.copy_(cut)
    assert torch.equal(target, expected.float())
    assert opened.read == [expected.numel()]


def test_narrow_is_asked_as_torchs(unread: Unread) -> None:
    assert torch.equal(unread.narrow(dim=1, start=torch.tensor(2), length=3) + 0, WHOLE.narrow(1, 2, 3))
    for start, length in ((7, 2), (-9, 1), (0, -1)):
        with pytest.raises((IndexError, RuntimeError)):
            WHOLE.narrow(0, start, length)
        with pytest.raises(IndexError, match="'m/w'"):
            unread.narrow(0, start, length)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t[::2],
        lambda t: t[torch.tensor([1, 5])],
        lambda t: t[t > 50],
        lambda t: t.t() if t.ndim == 2 else t.transpose(0, 2),
        lambda t: t.to(torch.float32),
        lambda t: t.reshape(-1),
        lambda t: torch.cat([t, torch.zeros(1, 6, 4, dtype=t.dtype)]),
        lambda t: torch.stack((t, t)),
        lambda t: t.chunk(4, 1)[2],
        lambda t: torch.nn.Parameter(t + 0, requires_grad=False).data,
        lambda t: t.float().numpy().sum(),
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t.T if t.ndim == 2 else t.mT,
        lambda t: t.unbind(1)[2],
        lambda t: next(iter(t)),
        lambda t: t.to("cpu", torch.float64),
        lambda t: torch.empty_like(t).fill_(1),
        lambda t: t.new_zeros(3),
    ],
)
def test_any_other_use_reads_it(use: Any, unread: Unread) -> None:
    found, expected = use(unread), use(WHOLE)
    assert type(found) is type(expected)
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


def test_what_is_read_is_aligned_as_torchs(unread: Unread) -> None:
    assert unread.narrow(0, 1, 3).contiguous().data_ptr() % 64 == 0


def test_an_integer_reads_its_part(opened: Noting, unread: Unread) -> None:
    assert torch.equal(unread[3], WHOLE[3])
    assert torch.equal(unread[2:, -1], WHOLE[2:, -1])
    assert opened.read == [24, 24]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.mul_(0),
        lambda t: t.__setitem__(0, 0),
        lambda t: torch.add(WHOLE, 1, out=t),
        lambda t: t.copy_(WHOLE),
        lambda t: t.data_ptr(),
        lambda t: t.as_subclass(torch.Tensor),
        lambda t: torch.Tensor._make_subclass(torch.Tensor, t) + 1,
    ],
)
def test_it_cannot_be_changed_nor_taken_for_memory(change: Any, unread: Unread) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        change(unread)
