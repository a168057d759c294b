"""The sampling noise is uniform, independent, and a function of its key alone."""

import numpy as np
import pytest

from twofold.step.noise import sample_key, uniforms


def draws(seed=0, stream="train", group=0, index=0, n=1):
    key = sample_key(seed, stream, group, index)
    return uniforms(np.full(n, key, dtype=np.uint64), np.arange(n))


def ks_distance(values):
    """Largest gap between the empirical distribution and the uniform one (Kolmogorov-Smirnov)."""
    ordered = np.sort(values)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return max(np.abs(ordered - steps[1:]).max(), np.abs(ordered - steps[:-1]).max())


def test_a_draw_does_not_depend_on_its_batch():
    rng = np.random.default_rng(0)
    keys = np.array([sample_key(3, "train", g, i) for g in range(5) for i in range(4)], np.uint64)
    keys = rng.choice(keys, 100)
    positions = rng.integers(0, 1000, 100)
    together = uniforms(keys, positions)
    alone = [uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone


def test_a_sample_is_one_splitmix64_sequence():
    # the published test vector of SplitMix64 seeded with 1234567
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    values = uniforms(np.full(5, 1234567, dtype=np.uint64), np.arange(5))
    assert values.tolist() == [((z >> 12) + 0.5) / 2**52 for z in published]


def test_keys_never_change():
    # If this fails, no recorded run can be replayed any more.
    values = [draws()[0], draws(1, "eval", 2, 3)[0], draws(-1, "train", 10**12, 7, n=5000)[4999]]
    assert values == [0.6050493365675439, 0.6960941991035418, 0.025624751324240802]


N = 20_000
AXES = {
    "positions": lambda: draws(seed=5, n=N),
    "samples": lambda: np.array([draws(index=i)[0] for i in range(N)]),
    "groups": lambda: np.array([draws(group=g)[0] for g in range(N)]),
    "seeds": lambda: np.array([draws(seed=s)[0] for s in range(N)]),
    "streams": lambda: np.array([draws(stream=str(s))[0] for s in range(N)]),
}


@pytest.mark.parametrize("axis", AXES)
def test_uniform_and_independent_along(axis):
    values = AXES[axis]()
    assert values.min() > 0 and values.max() < 1
    assert len(np.unique(values)) == N
    assert abs(values.mean() - 0.5) < 4 / np.sqrt(12 * N)
    assert ks_distance(values) < 1.95 / np.sqrt(N)  # 1 in 1000
    for lag in (1, 2, 8):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 4 / np.sqrt(N)
    # low bits and pairs of neighbours are even too
    cells = (values[:-1] * 16).astype(int) * 16 + (values[1:] * 16).astype(int)
    counts = np.bincount(cells, minlength=256)
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi2 < 255 + 4 * np.sqrt(2 * 255)


def test_every_part_of_the_key_counts():
    base = draws(1, "train", 2, 3, n=8)
    for other in (
        draws(2, "train", 2, 3, n=8),
        draws(1, "eval", 2, 3, n=8),
        draws(1, "train", 3, 2, n=8),
        draws(1, "train", 2, 4, n=8),
    ):
        assert not np.isin(other, base).any()


def test_the_ends_stay_open():
    # the key that leads to the largest and the smallest 64-bit value, through the inverse mixing
    for target in (0, 2**64 - 1):
        value = uniforms(np.array([unmix(target) - STEP & MASK], np.uint64), np.array([0]))[0]
        assert 0 < value < 1
        assert value == pytest.approx(target / 2**64, abs=1e-15)


MASK, STEP = 2**64 - 1, 0x9E3779B97F4A7C15


def unmix(z):
    def unshift(z, bits):
        out = z
        for _ in range(64 // bits + 1):
            out = z ^ out >> bits
        return out

    z = unshift(z, 31)
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z = unshift(z, 27)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return unshift(z, 30)
