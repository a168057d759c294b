"""Blocks are given out once, counted right, and all come back."""

import random

import pytest
import torch

from tiny import tiny_spec
from twofold.model.kv_cache import KVCache


def cache_of(n_blocks, block_tokens=4):
    return KVCache(tiny_spec(), n_blocks, block_tokens, torch.float32, "cpu")


def test_shape_and_padding_block():
    cache = cache_of(5)
    assert cache.keys.shape == cache.values.shape == (2, 6 * 4, 2, 8)
    assert cache.keys.data_ptr() != cache.values.data_ptr()
    blocks = cache.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]  # block 0 is never given out
    assert cache.slots([2, 1]).tolist() == [8, 9, 10, 11, 4, 5, 6, 7]


def test_refusal_takes_nothing():
    cache = cache_of(3)
    held = cache.allocate(2)
    assert cache.allocate(2) is None
    assert cache.n_free == 1
    cache.check_integrity([held])


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    cache = cache_of(2)
    blocks = cache.allocate(2)
    cache.share(blocks)
    cache.release(blocks)
    assert cache.n_free == 0
    cache.release(blocks)
    assert cache.n_free == 2
    cache.check_integrity([])


def test_growing_keeps_what_is_held():
    cache = cache_of(2)
    blocks = cache.allocate(2)
    cache.keys.normal_()
    cache.values.normal_()
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.grow(7)
    assert torch.equal(cache.keys[:, : keys.shape[1]], keys)
    assert torch.equal(cache.values[:, : values.shape[1]], values)
    assert cache.n_blocks == 7 and cache.n_free == 5
    more = cache.allocate(5)
    cache.check_integrity([blocks, more])


def test_random_use_agrees_with_naive_counting(seed):
    rng = random.Random(seed)
    cache = cache_of(12)
    holders = []
    for step in range(600):
        action = rng.randrange(4)
        if action == 0:
            n = rng.randrange(5)
            blocks = cache.allocate(n)
            taken = {block for held in holders for block in held}
            if blocks is None:
                assert n > cache.n_blocks - len(taken)
            else:
                assert len(set(blocks)) == n and not taken & set(blocks)
                holders.append(blocks)
        elif action == 1 and holders:
            shared = rng.choice(holders)
            cache.share(shared)
            holders.append(list(shared))
        elif action == 2 and holders:
            cache.release(holders.pop(rng.randrange(len(holders))))
        elif step % 100 == 99:
            cache.grow(cache.n_blocks + 2)
        cache.check_integrity(holders)
    for blocks in holders:
        cache.release(blocks)
    cache.check_integrity([])
    assert cache.n_free == cache.n_blocks


def test_mistakes_are_noticed():
    cache = cache_of(3)
    blocks = cache.allocate(1)
    with pytest.raises(AssertionError):
        cache.check_integrity([])  # a leak
    with pytest.raises(AssertionError):
        cache.check_integrity([blocks, blocks])  # held twice, counted once
    cache.release(blocks)
    with pytest.raises(AssertionError):
        cache.release(blocks)
    with pytest.raises(AssertionError):
        cache.share(blocks)
    with pytest.raises(AssertionError):
        cache.release([0])
