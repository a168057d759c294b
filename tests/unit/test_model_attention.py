"""Attention over ragged rows against a definition written with loops."""

import numpy as np
import pytest
import torch

from twofold.model.attention import Rows, attend, attend_eager

HEADS, KV_HEADS, HEAD_SIZE, SLOTS = 4, 2, 8, 64


def by_definition(q, k, v, rows):
    """softmax(q k / sqrt(head_size)) v, one row, one head, one key at a time, in fp64."""
    out = torch.zeros_like(q)
    for s, (first, count, position) in enumerate(rows.spans.tolist()):
        for i in range(count):
            start = int(rows.key_starts[s])
            seen = rows.key_index[start : start + position + i + 1]
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                weights = (k[seen, kv] @ q[first + i, h] * HEAD_SIZE**-0.5).softmax(0)
                out[first + i, h] = weights @ v[seen, kv]
    return out


def tensors(n_rows, seed, dtype=torch.float32):
    print("seed", seed)
    torch.manual_seed(seed)
    shapes = [(n_rows, HEADS), (SLOTS, KV_HEADS), (SLOTS, KV_HEADS)]
    return [torch.randn(*shape, HEAD_SIZE, dtype=dtype) for shape in shapes]


def shuffled_keys(lengths, seed):
    """Slots in no order; all sequences share the first two."""
    slots = np.random.default_rng(seed).permutation(SLOTS)
    ends = 2 + np.cumsum([length - 2 for length in lengths])
    starts = ends - [length - 2 for length in lengths]
    return [np.r_[slots[:2], slots[a:b]] for a, b in zip(starts, ends, strict=True)]


LAYOUTS = {
    "prefill": ([5, 3, 1], [0, 0, 0]),
    "decode": ([1, 1, 1, 1], [8, 2, 13, 5]),
    "resume": ([4, 1, 6], [3, 9, 2]),
    "single first row": ([1], [0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", [attend, attend_eager])
def test_equals_the_definition(layout, attention):
    lengths, positions = LAYOUTS[layout]
    keys = shuffled_keys([max(n + p, 2) for n, p in zip(lengths, positions, strict=True)], seed=1)
    rows = Rows.build(lengths, positions, keys)
    q, k, v = tensors(sum(lengths), seed=2)
    expected = by_definition(q.double(), k.double(), v.double(), rows)
    torch.testing.assert_close(attention(q, k, v, rows), expected.float())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", [attend, attend_eager])
def test_gradients_equal_the_definitions(layout, attention):
    lengths, positions = LAYOUTS[layout]
    keys = shuffled_keys([max(n + p, 2) for n, p in zip(lengths, positions, strict=True)], seed=3)
    rows = Rows.build(lengths, positions, keys)
    inputs = [t.requires_grad_() for t in tensors(sum(lengths), seed=4)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    upstream = torch.randn(sum(lengths), HEADS, HEAD_SIZE)
    grads = torch.autograd.grad(attention(*inputs, rows), inputs, upstream)
    expected = torch.autograd.grad(by_definition(*wide, rows), wide, upstream.double())
    for ours, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, reference.float())


@pytest.mark.parametrize("attention", [attend, attend_eager])
def test_bfloat16_computes_in_fp32_inside(attention):
    lengths, positions = LAYOUTS["resume"]
    rows = Rows.build(lengths, positions, shuffled_keys([7, 10, 8], seed=5))
    narrow = [t.bfloat16() for t in tensors(sum(lengths), seed=6)]
    out = attention(*narrow, rows)
    exact = attention(*[t.float() for t in narrow], rows)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=2**-8, atol=1e-6)


def test_unseen_keys_do_not_matter():
    """Slots that no row sees may hold anything, also NaN (a fresh cache is uninitialised)."""
    rows = Rows.build([1, 1], [2, 5], shuffled_keys([3, 6], seed=7))
    q, k, v = tensors(2, seed=8)
    clean = attend_eager(q, k, v, rows)
    unseen = torch.ones(SLOTS, dtype=torch.bool)
    unseen[rows.key_index] = False
    k[unseen] = v[unseen] = float("nan")
    assert torch.equal(attend_eager(q, k, v, rows), clean)
    assert torch.equal(attend(q, k, v, rows), attend(q, k.nan_to_num(), v.nan_to_num(), rows))


def test_rows_of_a_shared_prompt():
    """The example in the docstring of Rows."""
    prompt = np.arange(3)
    rows = Rows.build([3, 2, 2], [0, 3, 3], [prompt, np.arange(5), np.r_[prompt, 5, 6]])
    assert rows.spans.tolist() == [[0, 3, 0], [3, 2, 3], [5, 2, 3]]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert rows.key_starts.tolist() == [0, 3, 8]
    assert rows.key_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6]


def test_whole_sequences_see_their_own_rows():
    rows = Rows.whole([2, 3])
    assert rows.positions.tolist() == [0, 1, 0, 1, 2]
    assert rows.key_index.tolist() == [0, 1, 2, 3, 4]
    assert rows.key_starts.tolist() == [0, 2]
