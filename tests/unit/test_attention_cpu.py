"""The compiled attention kernel: right numbers, right gradients, and rows that do not depend on
what else is computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from twofold.model import cpu_kernels
from twofold.model.attention import Rows
from twofold.model.attention_cpu import attend_cpu

SHAPES = [  # heads, kv_heads, head_size
    (9, 3, 64),
    (4, 4, 64),
    (4, 1, 32),
    (3, 1, 128),
    (2, 1, 80),
    (6, 2, 8),
    (2, 2, 20),
    (16, 2, 16),
]


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    if cpu_kernels.load() is None:
        pytest.skip(cpu_kernels.unavailable_reason())
    torch.manual_seed(seed)


def group_pack(prompt: int, completions: list[int]) -> Rows:
    """A prompt computed once, and completions that see it and themselves."""
    prompt_rows = np.arange(prompt)
    keys, end = [prompt_rows], prompt
    for n in completions:
        keys.append(np.concatenate([prompt_rows, np.arange(end, end + n)]))
        end += n
    return Rows.build([prompt, *completions], [0] + [prompt] * len(completions), keys)


def random_qkv(n: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(n, h, size).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)]


def naive(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """The contract, one row at a time, in the precision of q."""
    out = []
    repeat = q.shape[1] // k.shape[1]
    for s, (first, count, position) in enumerate(rows.spans.tolist()):
        start = int(rows.key_starts[s])
        for i in range(count):
            index = rows.key_index[start : start + position + i + 1]
            keys, values = (x[index].repeat_interleave(repeat, 1) for x in (k, v))
            scores = torch.einsum("hd,khd->hk", q[first + i], keys) * q.shape[2] ** -0.5
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(out)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_output_and_gradients_equal_the_naive_ones(heads: int, kv_heads: int, size: int) -> None:
    rows = group_pack(70, [30, 1, 62])
    qkv = random_qkv(163, heads, kv_heads, size, torch.float32)
    out = attend_cpu(*qkv, rows)
    expected = naive(*qkv, rows)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, qkv, grad), torch.autograd.grad(expected, qkv, grad)
    )


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (2, 1, 20)])
def test_bfloat16_rounds_only_at_the_ends(heads: int, kv_heads: int, size: int) -> None:
    rows = group_pack(70, [30, 1, 62])
    qkv = random_qkv(163, heads, kv_heads, size, torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in qkv]
    out, exact = attend_cpu(*qkv, rows), attend_cpu(*wide, rows)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())
    grad = torch.randn_like(exact).bfloat16()
    grads = torch.autograd.grad(out, qkv, grad)
    exact_grads = torch.autograd.grad(exact, wide, grad.float())
    for got, want in zip(grads, exact_grads, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_bfloat16_output_is_rounded_to_nearest_even_and_keeps_infinity_and_nan() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF])
    values = bits.to(torch.int32).view(torch.float32).bfloat16().float()
    # One key: the output is its value, so bfloat16 values must come back as they are.
    v = values.bfloat16().reshape(1, 1, 6)
    q = k = torch.zeros(1, 1, 6, dtype=torch.bfloat16)
    assert torch.equal(attend_cpu(q, k, v, Rows.whole([1]))[..., :5], v[..., :5])
    assert attend_cpu(q, k, v, Rows.whole([1]))[..., 5].isnan().all()
    # Two equal weights: the mean of 1 and 1 + 2^-7 is a tie, and goes to the even one, 1.
    v = torch.tensor([1.0, 1.0078125]).bfloat16().reshape(2, 1, 1).expand(2, 1, 6).contiguous()
    out = attend_cpu(q.expand(2, 1, 6), k.expand(2, 1, 6), v, Rows.whole([2]))
    assert (out[1] == 1).all()


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (8, 1, 32), (2, 2, 8)])
@pytest.mark.usefixtures("_threads")
def test_a_row_is_the_same_bits_however_it_is_computed(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    n = 200
    q, k, v = (x.detach() for x in random_qkv(n, heads, kv_heads, size, dtype))
    whole = attend_cpu(q, k, v, Rows.whole([n]))

    slots = torch.randperm(3 * n)[:n]  # a paged cache with the keys anywhere
    cache_k, cache_v = (torch.full((3 * n, kv_heads, size), 7.0).to(dtype) for _ in range(2))
    cache_k[slots], cache_v[slots] = k, v
    where = slots.numpy()
    for cut in (1, 63, 64, 65, 130, 199):  # the rest as one span after `cut` positions
        rows = Rows.build([n - cut], [cut], [where])
        assert torch.equal(attend_cpu(q[cut:], cache_k, cache_v, rows), whole[cut:]), cut
    decode = Rows.build([1] * n, range(n), [where] * n)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend_cpu(q, cache_k, cache_v, decode), whole)
        assert torch.equal(attend_cpu(q, k, v, Rows.whole([n])), whole)

    # Training: another group first, then this sequence cut into a prompt and its completion.
    other = [x.detach() for x in random_qkv(50, heads, kv_heads, size, dtype)]
    packed = [torch.cat(pair) for pair in zip(other, (q, k, v), strict=True)]
    own = np.arange(50, 50 + n)
    rows = Rows.build([50, 77, n - 77], [0, 0, 77], [np.arange(50), own, own])
    q, k, v = (x.requires_grad_() for x in packed)
    out = attend_cpu(q, k, v, rows)
    assert out.requires_grad
    assert torch.equal(out[50:], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_a_fused_projection_give_the_same_as_copies(dtype: torch.dtype) -> None:
    fused = torch.randn(40, 9 * 16).to(dtype).requires_grad_()
    q, k, v = fused.unflatten(-1, (9, 16)).split((5, 2, 2), dim=1)
    q, rows = q[:, :4], Rows.whole([25, 15])
    out = attend_cpu(q, k, v, rows)
    assert torch.equal(out, attend_cpu(q.contiguous(), k.contiguous(), v.contiguous(), rows))
    columns = torch.randn(4, 16, 40).to(dtype).permute(2, 0, 1)  # last stride is not 1
    (got,) = torch.autograd.grad(out, fused, columns, retain_graph=True)
    (want,) = torch.autograd.grad(out, fused, columns.contiguous())
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("_threads")
def test_gradients_are_deterministic_for_a_thread_count(dtype: torch.dtype) -> None:
    rows = group_pack(43, [20] * 8)
    qkv = random_qkv(43 + 160, 9, 3, 64, dtype)
    grad = torch.randn(43 + 160, 9, 64).to(dtype)
    by_threads = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        runs = [torch.autograd.grad(attend_cpu(*qkv, rows), qkv, grad) for _ in range(5)]
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
        by_threads.append(runs[0])
    for other in by_threads[1:]:
        assert torch.equal(other[0], by_threads[0][0])  # q's are not summed across threads
        torch.testing.assert_close(other, by_threads[0])


def test_a_cache_that_needs_no_gradient_gets_none() -> None:
    q, k, v = random_qkv(12, 4, 2, 16, torch.float32)
    want = torch.autograd.grad(attend_cpu(q, k, v, Rows.whole([12])).sum(), q)
    got = torch.autograd.grad(attend_cpu(q, k.detach(), v.detach(), Rows.whole([12])).sum(), q)
    assert torch.equal(got[0], want[0])
    with torch.no_grad():
        assert not attend_cpu(q, k, v, Rows.whole([12])).requires_grad


def test_keys_that_no_row_sees_get_zero_gradient() -> None:
    q, k, v = random_qkv(10, 2, 1, 16, torch.float32)
    rows = Rows.build([3, 0], [1, 0], [np.array([9, 4, 6, 2]), np.array([], dtype=np.int64)])
    grads = torch.autograd.grad(attend_cpu(q[:3], k, v, rows).sum(), (k, v))
    for grad in grads:
        assert grad.abs().sum(dim=(1, 2)).nonzero().flatten().tolist() == [2, 4, 6, 9]


def test_no_rows() -> None:
    q, k, v = random_qkv(0, 4, 2, 16, torch.float32)
    rows = Rows(np.zeros((0, 3), np.int64), *(torch.zeros(0, dtype=torch.int64) for _ in range(3)))
    out = attend_cpu(q, k, v, rows)
    assert out.shape == (0, 4, 16)
    assert torch.autograd.grad(out.sum(), k)[0].shape == (0, 2, 16)


def test_huge_scores_neither_overflow_nor_leak() -> None:
    q, k, v = (x.detach() for x in random_qkv(100, 1, 1, 16, torch.float32))
    out = attend_cpu(1e15 * q, 1e15 * k, v, Rows.whole([100]))  # softmax is an argmax
    scores = torch.einsum("qhd,khd->hqk", q, k).tril() + torch.ones(100, 100).triu(1) * -1e9
    assert torch.equal(out[:, 0], v[scores[0].argmax(-1), 0])


@pytest.mark.parametrize("bad", [-1, 12])
def test_an_index_outside_the_keys_is_refused(bad: int) -> None:
    q, k, v = random_qkv(12, 4, 2, 16, torch.float32)
    rows = Rows.whole([12])
    rows.key_index[5] = bad
    with pytest.raises(AssertionError, match="key_index"):
        attend_cpu(q, k, v, rows)


def test_calls_from_several_python_threads() -> None:
    q, k, v = (x.detach() for x in random_qkv(300, 9, 3, 64, torch.float32))
    rows = Rows.whole([300])
    want, same = attend_cpu(q, k, v, rows), []

    def call() -> None:
        same.extend(torch.equal(attend_cpu(q, k, v, rows), want) for _ in range(5))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert same == [True] * 15


def test_there_is_one_openmp_runtime() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    q, k, v = random_qkv(300, 9, 3, 64, torch.float32)
    attend_cpu(q, k, v, Rows.whole([300]))
    loaded = {line.split()[-1] for line in maps.read_text().splitlines()}
    runtimes = {p for p in loaded if Path(p).name.startswith(("libgomp", "libomp", "libiomp"))}
    assert len(runtimes) == 1, runtimes
