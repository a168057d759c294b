"""The draw follows the distribution, truncation keeps what it should, log-probs are untruncated."""

import numpy as np
import pytest
import torch

from twofold.step.sampling import Sampling, _pick, sample

VOCAB = 700  # more than two blocks of the draw, and not a multiple of one


def random_logits(seed, n, vocab=VOCAB, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, vocab, generator=generator) * spread


def grid(n):
    """n uniforms that lie evenly in (0, 1): an inverse CDF then gives exact frequencies."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def naive_kept(logits, sampling):
    """The tokens of one row that truncation keeps, by sorting, in float64. No ties."""
    probs = logits.double().softmax(-1)
    order = probs.argsort(descending=True).tolist()
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(probs[i].item() for i in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += probs[token].item()
    return {token for token in kept if probs[token] >= sampling.min_p * probs[order[0]]}


TRUNCATIONS = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.001},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    {"top_p": 0.7, "min_p": 0.02},
]


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
def test_truncation_keeps_what_its_naive_twin_keeps(options, seed):
    sampling = Sampling(**options)
    n = 2000
    for row in random_logits(seed, 2):
        token_ids, logprobs, kept_logmass = sample(row.expand(n, -1), grid(n), sampling)
        kept = naive_kept(row, sampling)
        probs = row.double().softmax(-1)
        mass = sum(probs[token].item() for token in kept)
        drawn = set(token_ids.tolist())
        assert drawn <= kept
        assert {t for t in kept if probs[t] / mass > 2 / n} <= drawn
        torch.testing.assert_close(kept_logmass, torch.full((n,), mass).log())
        # recorded before truncation
        torch.testing.assert_close(logprobs, probs.log().float()[token_ids])
        expected = torch.zeros(VOCAB).double()
        for token in kept:
            expected[token] = probs[token] / mass
        counts = torch.bincount(token_ids, minlength=VOCAB)
        assert (counts - expected * n).abs().max() <= 1.01  # both ends of a token's interval


def test_top_p_beyond_the_ranked_part_and_flat_rows_beside_peaked_ones(seed):
    # 0.9 of a flat row of 5000 needs more tokens than are ranked at first; ties are all kept
    flat = torch.zeros(1, 5000)
    peaked = random_logits(seed, 1, 5000, spread=5.0)
    almost_flat = random_logits(seed + 1, 1, 5000, spread=0.01)
    logits = torch.cat([flat, peaked, almost_flat])
    sampling = Sampling(top_p=0.9)
    _, _, kept_logmass = sample(logits, grid(3), sampling)
    assert kept_logmass[0].item() == pytest.approx(0.0, abs=1e-6)
    assert kept_logmass[2].exp().item() == pytest.approx(0.9, abs=1e-3)
    alone = sample(peaked.expand(2, -1), grid(2), sampling)
    assert kept_logmass[1] == alone[2][0]


def test_distribution_chi_square(seed):
    n = 20_000
    generator = torch.Generator().manual_seed(seed)
    row = random_logits(seed, 1, 60, spread=1.0)
    uniforms = torch.rand(n, dtype=torch.float64, generator=generator)
    token_ids, _, kept_logmass = sample(row.expand(n, -1), uniforms, Sampling())
    expected = row[0].double().softmax(-1).numpy() * n
    counts = np.bincount(token_ids.numpy(), minlength=60)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 59 + 4 * np.sqrt(2 * 59)
    assert (kept_logmass == 0).all()


def test_a_row_does_not_depend_on_the_others(seed):
    logits = random_logits(seed, 40)
    uniforms = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for options in ({}, *TRUNCATIONS, {"greedy": True}):
        whole = sample(logits, uniforms, Sampling(**options))
        for rows in (slice(0, 16), slice(3, 27), slice(38, 40)):
            part = sample(logits[rows], uniforms[rows], Sampling(**options))
            for a, b in zip(whole, part, strict=True):
                assert torch.equal(a[rows], b)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.99}], ids=str)
def test_tokens_without_probability_are_never_drawn(options):
    edges = torch.tensor([2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    n = len(edges)
    for alive in ([0], [VOCAB - 1], [255, 256], [1, 300, 511]):
        logits = torch.full((n, VOCAB), -torch.inf)
        logits[:, alive] = torch.tensor([1.0, 2.0, 3.0])[: len(alive)]
        token_ids, logprobs, _ = sample(logits, edges, Sampling(**options))
        assert set(token_ids.tolist()) <= set(alive)
        assert logprobs.isfinite().all()
        assert token_ids[0] == alive[0] and token_ids[-1] == alive[-1]


def test_rounding_at_the_end_of_the_sum_stays_on_a_likely_token():
    # 699 tokens so unlikely that their sum vanishes beside the first; the last has none at all
    logits = torch.full((2, VOCAB), -60.0)
    logits[:, 0] = 0.0
    logits[:, -1] = -torch.inf
    uniforms = torch.tensor([1 - 2.0**-53, 1 - 2.0**-30], dtype=torch.float64)
    token_ids, _, _ = sample(logits, uniforms, Sampling())
    assert token_ids[1] == 0
    assert token_ids[0] != VOCAB - 1


def test_rounding_below_zero_still_picks_an_entry_with_mass():
    masses = torch.tensor([[0.0, 0.0, 0.25, 0.75, 0.0]] * 3, dtype=torch.float64)
    index, before = _pick(masses, torch.tensor([-1e-17, 0.25, 1.5], dtype=torch.float64))
    assert index.tolist() == [2, 3, 3]
    assert before.tolist() == [0.0, 0.25, 0.25]


def test_rare_tokens_keep_their_share():
    # float32 sums would lose them: 1e-9 each, after a mass of 1
    logits = torch.full((1, VOCAB), -20.72)
    logits[0, 0] = 0.0
    tail = logits[0].double().softmax(-1)[1:].sum()
    places = torch.arange(64, dtype=torch.float64) / 64
    uniforms = 1 - tail * (1 - (places + 0.5 / 64))
    token_ids, _, _ = sample(logits.expand(64, -1), uniforms, Sampling())
    wanted = 1 + ((places + 0.5 / 64) * (VOCAB - 1)).long()
    assert (token_ids - wanted).abs().max() <= 1


def test_greedy_takes_the_likeliest_and_records_its_logprob(seed):
    logits = random_logits(seed, 5)
    token_ids, logprobs, kept_logmass = sample(logits, grid(5), Sampling(greedy=True, top_k=3))
    assert torch.equal(token_ids, logits.argmax(-1))
    expected = logits.log_softmax(-1).amax(-1)
    torch.testing.assert_close(logprobs, expected)
    assert (kept_logmass == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)
