"""Copies for decoding follow their weights, and multiply as F.linear does, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.model import packed
from twofold.model.packed import PACK_AFTER, PackedWeights


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> Iterator[None]:
    if not PackedWeights()._usable:
        pytest.skip("oneDNN has no bfloat16 here")
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize(
    ("out", "width"), [(960, 576), (3072, 576), (576, 1536), (300, 32), (7, 20)]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_multiplies_as_the_weight_itself(
    monkeypatch: pytest.MonkeyPatch, out: int, width: int, with_bias: bool, threads: int
) -> None:
    monkeypatch.setattr(packed, "PACK_AFTER", 0)
    torch.set_num_threads(threads)
    weight, x = random(out, width), random(300, width)
    bias = random(out) if with_bias else None
    whole = F.linear(x, weight, bias)
    for packed_at in (16, 64):
        weights = PackedWeights()
        weights.linear(x[:packed_at], weight, bias)
        assert weights._copies[id(weight)].packed is not None
        for n in (1, 3, 16, 24, 32, 64, 72, 256):
            assert torch.equal(weights.linear(x[:n], weight, bias), whole[:n]), (packed_at, n)


def test_a_copy_is_made_when_it_pays_and_follows_every_change() -> None:
    weight, x, weights = random(64, 32).requires_grad_(), random(16, 32), PackedWeights()

    def is_packed() -> bool:
        return weights._copies[id(weight)].packed is not None

    changes = [
        lambda: weight.copy_(random(64, 32)),
        lambda: weight.mul_(2),
        lambda: weight[3:5].zero_(),
    ]
    for change in [lambda: None, *changes]:
        change()
        for _ in range(PACK_AFTER):
            assert torch.equal(weights.linear(x, weight), F.linear(x, weight))
            assert not is_packed()
        for _ in range(3):
            assert torch.equal(weights.linear(x, weight), F.linear(x, weight))
            assert is_packed()
    weights.clear()
    weights.linear(x, weight)
    assert not is_packed()


def test_everything_else_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACK_AFTER", 0)
    weights, weight = PackedWeights(), random(64, 32).requires_grad_()
    weights.linear(random(packed.MAX_ROWS + 1, 32), weight)
    weights.linear(torch.randn(16, 32), weight.float())
    with torch.enable_grad():
        assert weights.linear(random(16, 32), weight).requires_grad
    assert not weights._copies
