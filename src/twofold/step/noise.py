"""Sampling noise as a function of its key: (run seed, stream, group, index, position).

Owns: the counter-based uniform draw. Does not own: what is drawn with it (`sampling`). Nothing here
has state, so a token's draw is the same whatever shares its batch, on which attempt, and when.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014); a sample is one SplitMix64 sequence, its positions
are the steps.
"""

from __future__ import annotations

import hashlib

import numpy as np

_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment
_MASK = (1 << 64) - 1


def sample_key(seed: int, stream: str, group_id: int, index: int) -> int:
    """Key (64 bits) of a sample's noise. `stream` ("train", "eval") tells uses of a seed apart."""
    digest = hashlib.blake2b(stream.encode(), digest_size=8).digest()
    key = 0
    for part in (seed, int.from_bytes(digest, "little"), group_id, index):
        key = _mix(key + part * _STEP & _MASK)
    return key


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One draw per row: keys uint64 [n] (`sample_key`), positions int64 [n] within the completion
    -> float64 [n], strictly between 0 and 1, uniform with 52 bits."""
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # 52 bits and a half: with 53 the largest value would round to 1
    draws: np.ndarray = ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return draws


def _mix(z: int) -> int:
    """The finaliser on one Python integer below 2**64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
