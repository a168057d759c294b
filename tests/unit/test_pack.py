"""Packs: every target once, after the right context, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from twofold.step.logprob import ROW_MULTIPLE
from twofold.step.pack import build_pack, plan_packs
from twofold.types import Group, Prompt, Sample, SampleId


def group_of(group_id: int, prompt_ids: list[int], completions: list[list[int]]) -> Group:
    samples = [
        Sample(SampleId(group_id, i), ids, finish_reason="stop")
        for i, ids in enumerate(completions)
    ]
    return Group(group_id, Prompt(""), prompt_ids, 0, 0, samples)


def random_groups(seed: int) -> list[Group]:
    print("seed", seed)
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(1, 1000) for _ in range(rng.randint(1, most))]

    return [group_of(g, tokens(12), [tokens(20) for _ in range(4)]) for g in range(6)]


def keep_all(sample: Sample) -> bool:
    return True


def contexts(groups: list[Group], max_rows: int) -> list[tuple[SampleId, list[int], int]]:
    """(sample, tokens that the predicting row sees, target) of every target, from the tensors."""
    found = []
    for parts in plan_packs(groups, max_rows, keep_all):
        pack = build_pack(parts, "cpu")
        rows, tokens = pack.rows, pack.token_ids.tolist()
        for row, target, sample in zip(
            pack.hidden_index.tolist(), pack.targets.tolist(), pack.sample_of_target, strict=True
        ):
            sequence = next(
                s for s, (first, n, _) in enumerate(rows.spans.tolist()) if first <= row < first + n
            )
            start = int(rows.key_starts[sequence])
            keys = rows.key_index[start : start + int(rows.positions[row]) + 1]
            assert keys[-1] == row, "a row sees itself last"
            found.append((pack.samples[sample].sample_id, [tokens[k] for k in keys], target))
    return found


def test_the_docstrings_example() -> None:
    (parts,) = plan_packs([group_of(0, [7, 8, 9], [[1, 2], [3]])], 100, keep_all)
    pack = build_pack(parts, "cpu")
    assert pack.token_ids.tolist() == [7, 8, 9, 1] + [0] * (ROW_MULTIPLE - 4)
    assert pack.hidden_index.tolist() == [2, 3, 2]
    assert pack.targets.tolist() == [1, 2, 3]
    assert pack.sample_of_target.tolist() == [0, 0, 1]
    assert parts[0].n_rows == 4


@pytest.mark.parametrize("max_rows", [1, 30, 70, 150, 10_000])
def test_every_target_once_after_its_own_context(max_rows: int) -> None:
    groups = random_groups(seed=11)
    expected = [
        (sample.sample_id, group.prompt_ids + sample.token_ids[:place], token)
        for group in groups
        for sample in group.samples
        for place, token in enumerate(sample.token_ids)
    ]
    assert contexts(groups, max_rows) == expected


@pytest.mark.parametrize("max_rows", [30, 70, 150])
def test_packs_are_full_but_not_too_full_and_prompts_are_computed_once(max_rows: int) -> None:
    groups = random_groups(seed=12)
    packs = plan_packs(groups, max_rows, keep_all)
    for parts in packs:
        lone = len(parts) == 1 and len(parts[0].samples) == 1
        assert lone or sum(part.n_rows for part in parts) <= max_rows
        pack = build_pack(parts, "cpu")
        n_rows = sum(part.n_rows for part in parts)
        assert len(pack.token_ids) % ROW_MULTIPLE == 0, "every other number costs memory for good"
        assert n_rows <= len(pack.token_ids) < n_rows + ROW_MULTIPLE
    for group in groups:
        whole = len(group.prompt_ids) + sum(len(s.token_ids) - 1 for s in group.samples)
        n_parts = sum(part.prompt_ids is group.prompt_ids for parts in packs for part in parts)
        assert n_parts == 1 or whole > max_rows


def test_packs_do_not_depend_on_the_order_of_the_batch() -> None:
    groups = random_groups(seed=13)
    shuffled = [
        Group(g.group_id, g.prompt, g.prompt_ids, 0, 0, g.samples[::-1]) for g in groups[::-1]
    ]
    for a, b in zip(
        plan_packs(groups, 60, keep_all), plan_packs(shuffled, 60, keep_all), strict=True
    ):
        assert torch.equal(build_pack(a, "cpu").token_ids, build_pack(b, "cpu").token_ids)


def test_samples_that_are_not_kept_take_no_rows() -> None:
    groups = [group_of(0, [5, 6], [[1, 2], [3, 4]]), group_of(1, [7], [[8, 9]])]
    (parts,) = plan_packs(groups, 100, lambda sample: sample.sample_id == (0, 1))
    assert [(part.prompt_ids, part.samples) for part in parts] == [([5, 6], [groups[0].samples[1]])]
    assert plan_packs(groups, 100, lambda sample: False) == []
