"""Log-probs: one definition for sampling and training; chunks change neither bits nor gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.step.logprob import chunked_logprobs, padded_rows, token_logprobs

SEED = 3


def random_head(dtype: torch.dtype, n: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    print("seed", SEED)
    hidden = torch.randn(n, 32, generator=generator).to(dtype)
    weight = (torch.randn(301, 32, generator=generator) / 4).to(dtype)
    return hidden, weight, torch.randint(0, 301, (n,), generator=generator)


def test_padded_rows() -> None:
    assert [padded_rows(n) for n in (1, 16, 17, 24, 250)] == [16, 16, 24, 24, 256]


@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 70, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_equal_the_whole(chunk_rows: int, temperature: float) -> None:
    hidden, weight, targets = random_head(torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    upstream = torch.randn(70, generator=torch.Generator().manual_seed(SEED))

    distribution = torch.log_softmax(F.linear(hidden, weight) / temperature, -1)
    expected = distribution.gather(1, targets[:, None])[:, 0]
    expected_grads = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    logprobs, entropy = chunked_logprobs(hidden, weight, targets, temperature, chunk_rows)
    grads = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))

    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(distribution.exp() * distribution).sum(-1))
    assert not entropy.requires_grad
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_finds_the_sampled_logprobs_bit_for_bit(dtype: torch.dtype) -> None:
    hidden, weight, targets = random_head(dtype)
    in_training = chunked_logprobs(hidden, weight, targets, 0.7, chunk_rows=67)[0]
    for rows in (slice(0, 16), slice(46, 70)):  # 3 of them in the last chunk
        sampled = token_logprobs(F.linear(hidden[rows], weight), targets[rows], 0.7)
        assert torch.equal(in_training[rows], sampled)


def test_bfloat16_head_gradient_adds_up_in_float32() -> None:
    """64 chunks with small gradients after one with a large one: in bfloat16 they would vanish."""
    n, width = 65, 8
    hidden = torch.ones(n, width, dtype=torch.bfloat16)
    weight = torch.zeros(16, width, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(n, dtype=torch.long)
    upstream = torch.full((n,), 2.0**-10)
    upstream[0] = 1.0
    logprobs, _ = chunked_logprobs(hidden, weight, targets, 1.0, chunk_rows=1)
    (grad,) = torch.autograd.grad((logprobs * upstream).sum(), weight)
    assert grad.dtype == torch.bfloat16
    expected = (1 - 1 / 16) * upstream.sum()
    assert grad[0, 0].item() == expected.bfloat16().item() != (1 - 1 / 16)


def test_no_tensor_of_all_tokens_times_vocabulary_is_made() -> None:
    hidden, weight, targets = random_head(torch.float32, n=512)
    hidden.requires_grad_(), weight.requires_grad_()
    largest = _LargestOutput()
    with largest:
        logprobs, _ = chunked_logprobs(hidden, weight, targets, 1.0, chunk_rows=64)
        logprobs.sum().backward()
    assert largest.numel == 64 * 301


class _LargestOutput(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out
