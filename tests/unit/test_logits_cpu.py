"""What kernels read out of logits is what plain torch reads, and the same bits beside any rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twofold.model import cpu_kernels, logits_cpu
from twofold.step import logprob

VOCABS = [1, 7, 256, 700, 49_152]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    if cpu_kernels.load() is None:
        pytest.skip(cpu_kernels.unavailable_reason())
    torch.manual_seed(seed)


def random(n: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(n, vocab) * 4).to(dtype)
    return logits, torch.randint(0, vocab, (n,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_is_read_is_right(vocab: int, dtype: torch.dtype, temperature: float) -> None:
    logits, targets = random(5, vocab, dtype)
    logprobs, entropy, largest, inverse_sum = logits_cpu.read(logits, targets, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(
        logprobs.double(), exact.gather(1, targets[:, None])[:, 0], rtol=2e-7, atol=2e-7
    )
    expected = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(entropy.double(), expected, rtol=2e-6, atol=2e-6)
    twin = logprob._read(logits, targets, temperature)
    for got, want in zip((logprobs, entropy, largest, inverse_sum), twin, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits_cpu.logprobs(logits, targets, temperature), logprobs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_gradient_is_that_of_the_twin(
    monkeypatch: pytest.MonkeyPatch, vocab: int, dtype: torch.dtype
) -> None:
    logits, targets = random(9, vocab, dtype)
    _, _, largest, inverse_sum = logits_cpu.read(logits, targets, 0.6)
    arguments = (targets, largest, inverse_sum, torch.randn(9), 0.6)
    got = logprob._gradient_(logits.clone(), *arguments)
    monkeypatch.setattr(cpu_kernels, "forced_eager", True)
    want = logprob._gradient_(logits.clone(), *arguments)
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-6)


def test_a_peaked_row_keeps_its_small_entropy() -> None:
    logits = torch.full((2, 1000), -15.0)
    logits[:, 3] = 0.0
    _, entropy, *_ = logits_cpu.read(logits, torch.tensor([3, 4]), 1.0)
    exact = logits.double().log_softmax(-1)
    expected = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=0)


def test_tokens_that_cannot_come_and_logits_that_are_no_numbers() -> None:
    logits = torch.full((3, 600), -torch.inf)
    logits[:, 300] = 2.0
    logits[1, 599] = 2.0
    logits[2, 5] = torch.nan
    logprobs, entropy, *_ = logits_cpu.read(logits, torch.tensor([300, 599, 5]), 0.5)
    assert logprobs[0] == 0 and entropy[0] == 0
    assert logprobs[1].item() == entropy[1].neg().item() == pytest.approx(-0.693147, abs=1e-6)
    assert logprobs[2].isnan()
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    token_ids, drawn = logits_cpu.draw(logits, uniforms, 0.5)
    assert token_ids[0] == 300 and token_ids[1] in (300, 599) and drawn[2].isnan()


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("_threads")
def test_a_row_is_the_same_bits_with_any_others_and_any_threads(dtype: torch.dtype) -> None:
    n = 40
    logits, targets = random(n, 5000, dtype)
    uniforms, scale = torch.rand(n, dtype=torch.float64), torch.randn(n)

    def rows(first: int, end: int) -> list[Tensor]:
        r = slice(first, end)
        read = logits_cpu.read(logits[r], targets[r], 0.7)
        drawn = logits_cpu.draw(logits[r], uniforms[r], 0.7)
        assert torch.equal(logits_cpu.logprobs(logits[r], drawn[0], 0.7), drawn[1])
        copy = logits[r].clone()
        return [*read, *drawn, logits_cpu.gradient_(copy, targets[r], *read[2:], scale[r], 0.7)]

    torch.set_num_threads(1)
    whole = rows(0, n)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, end in ((0, n), (7, 8), (30, 40)):
            for got, want in zip(rows(first, end), whole, strict=True):
                assert torch.equal(got, want[first:end]), (threads, first, end)


@pytest.mark.parametrize("token", [-1, 7])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(AssertionError, match="vocabulary"):
        logits_cpu.logprobs(torch.zeros(2, 7), torch.tensor([0, token]), 1.0)
