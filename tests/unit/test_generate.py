"""What a sample gets does not depend on what runs beside it, when, or how often it was interrupted;
and it is what the plain forward pass of the whole sequence says."""

import random

import numpy as np
import pytest
import torch

from tiny import VOCAB, SimpleCache, tiny_model
from twofold.model import attention, packed
from twofold.model.attention import Rows
from twofold.step import lanes, noise
from twofold.step.generate import Generator
from twofold.step.logprob import chunked_logprobs, token_logprobs
from twofold.step.sampling import Sampling
from twofold.types import Group, Prompt, Sample, SampleId

EXACT = attention.kernel_name() == "cpu kernel"  # else attention depends on the batch by rounding
MAX_NEW = 12
SAMPLING = Sampling(temperature=0.6, max_new_tokens=MAX_NEW, stop_ids=(7, 20, 33, 90, 110, 250))


def make_group(group_id, n_prompt, n_samples, deadline=0, seed=0):
    rng = random.Random(f"{seed} {group_id}")
    ids = [rng.randrange(VOCAB) for _ in range(n_prompt)]
    samples = [Sample(SampleId(group_id, index)) for index in range(n_samples)]
    return Group(group_id, Prompt("?"), ids, 0, deadline, samples)


def make_groups(seed=0):
    """13 samples, prompts of 1 to 37 tokens."""
    shapes = [(1, 4), (37, 3), (16, 2), (9, 4)]
    return [make_group(i, n, g, deadline=i // 2, seed=seed) for i, (n, g) in enumerate(shapes)]


def make_generator(model, sampling=SAMPLING, **options):
    defaults = {"max_running_samples": 16, "kv_cache_tokens": 0, "kv_block_tokens": 4}
    return Generator(model, sampling, seed=3, stream="train", **{**defaults, **options})


def finish(generator, groups=(), quantum=1000, between=lambda: None):
    """Runs to the end in quanta; checks the bookkeeping after each, and the chunks."""
    before = {s.sample_id: len(s.token_ids) for group in groups for s in group.samples}
    generator.admit(groups)
    quanta = []
    while generator.unfinished:
        quanta.append(generator.run(quantum))
        generator.check_integrity()
        between()
        generator.check_integrity()
    cache = generator._lanes.cache
    assert cache is None or cache.n_free == cache.n_blocks
    assert not generator._lanes._prompts
    check_chunks(quanta, groups, before)
    return quanta


def check_chunks(quanta, groups, before):
    """All chunks of a sample, one after the other, are the sample."""
    for group in groups:
        for sample in group.samples:
            start = before[sample.sample_id]
            for chunk in [c for q in quanta for c in q.chunks if c.sample_id == sample.sample_id]:
                end = start + len(chunk.token_ids)
                assert chunk.start == start and end > start
                assert chunk.token_ids == sample.token_ids[start:end]
                assert chunk.logprobs == sample.logprobs[start:end]
                assert chunk.kept_logmass == sample.kept_logmass[start:end]
                assert sample.versions[start:end] == [chunk.version] * (end - start)
                start = end
            n = len(sample.token_ids)
            assert start == n == len(sample.logprobs) == len(sample.versions)
            assert n == len(sample.kept_logmass)
    finished = [s for q in quanta for s in q.finished]
    assert len(finished) == len({id(s) for s in finished}) and all(s.finished for s in finished)
    in_chunks = sum(len(c.token_ids) for q in quanta for c in q.chunks)
    assert sum(q.n_tokens for q in quanta) == in_chunks


def assert_same(groups, expected):
    for group, other in zip(groups, expected, strict=True):
        for a, b in zip(group.samples, other.samples, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), a.sample_id
            if EXACT:
                assert a.logprobs == b.logprobs, a.sample_id
            else:
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            assert a.kept_logmass == pytest.approx(b.kept_logmass, abs=1e-6)


@torch.no_grad()
def forward_logprobs(model, groups, temperature):
    """Log-probs of every sampled token by the plain packed forward, sample by sample."""
    samples = [(group, sample) for group in groups for sample in group.samples]
    ids = [group.prompt_ids + sample.token_ids for group, sample in samples]
    flat = torch.tensor([token for row in ids for token in row])
    hidden = model(flat, Rows.whole([len(row) for row in ids]))
    out, start = [], 0
    for (group, sample), tokens in zip(samples, ids, strict=True):
        first = start + len(group.prompt_ids) - 1
        rows = hidden[first : first + len(sample.token_ids)]
        targets = torch.tensor(sample.token_ids)
        out.append(chunked_logprobs(rows, model.head_weight, targets, temperature, 64)[0].tolist())
        start += len(tokens)
    return out


@pytest.fixture(scope="module")
def model():
    return tiny_model(1).requires_grad_(False)


@pytest.fixture(scope="module")
def expected(model):
    """Every sample on its own: nothing shares its batch, nothing interrupts it."""
    groups = make_groups()
    for group in groups:
        for sample in group.samples:
            alone = Group(group.group_id, group.prompt, group.prompt_ids, 0, 0, [sample])
            finish(make_generator(model, max_running_samples=1), [alone])
    reasons = [s.finish_reason for g in groups for s in g.samples]
    assert {"stop", "length"} == set(reasons)
    assert len({tuple(s.token_ids) for g in groups for s in g.samples}) == len(reasons)
    return groups


@pytest.mark.parametrize("quantum", [1, 3, 1000])
@pytest.mark.parametrize("n_lanes", [1, 5, 16])
def test_batch_lanes_and_quanta_change_nothing(model, expected, quantum, n_lanes):
    groups = make_groups()
    finish(make_generator(model, max_running_samples=n_lanes), groups, quantum)
    assert_same(groups, expected)


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
def test_block_size_changes_nothing(model, expected, block_tokens):
    groups = make_groups()
    finish(make_generator(model, kv_block_tokens=block_tokens), groups, 4)
    assert_same(groups, expected)


@pytest.mark.parametrize("leave", ["recompute", "keep", "release"])
@pytest.mark.parametrize("n_lanes", [5, 16])
def test_interruption_at_every_token_changes_nothing(model, expected, leave, n_lanes):
    generator = make_generator(model, max_running_samples=n_lanes)
    ways = {
        "recompute": lambda: generator.pause(keep_kv=False),
        "keep": lambda: generator.pause(keep_kv=True),
        "release": generator.release,
    }
    groups = make_groups()
    finish(generator, groups, quantum=1, between=ways[leave])
    assert_same(groups, expected)


@pytest.mark.parametrize("n_lanes", [2, 16])
def test_a_full_cache_preempts_and_still_finishes_everything(model, expected, n_lanes):
    groups = make_groups()
    # 13 blocks: the longest sample needs 10 + 3 of them
    generator = make_generator(model, max_running_samples=n_lanes, kv_cache_tokens=52)
    quanta = finish(generator, groups, quantum=2)
    assert sum(q.preemptions for q in quanta) > 0
    assert_same(groups, expected)


def test_no_sample_starts_only_to_be_preempted(model):
    """The cache has room for hardly more than one whole sample: each of the others loses its keys
    once at most, because starting leaves a block for every running sample that can still grow."""
    groups = [make_group(i, 4, 1) for i in range(6)]
    generator = make_generator(model, Sampling(max_new_tokens=16), kv_cache_tokens=24)
    quanta = finish(generator, groups)
    assert 0 < sum(q.preemptions for q in quanta) <= 5


def test_enough_room_never_preempts(model):
    for n_lanes in (1, 3, 16):
        quanta = finish(make_generator(model, max_running_samples=n_lanes), make_groups(), 5)
        assert sum(q.preemptions for q in quanta) == 0


def test_groups_that_come_later_and_are_longer(model, expected):
    """The cache and its index grow while samples run."""
    groups = make_groups()
    generator = make_generator(model)
    order = sorted(groups, key=lambda group: len(group.prompt_ids))
    quanta = []
    for group in order:
        generator.admit([group])
        quanta.append(generator.run(2))
        generator.check_integrity()
    quanta += finish(generator)
    check_chunks(quanta, groups, {s.sample_id: 0 for g in groups for s in g.samples})
    assert_same(groups, expected)


def test_resumed_from_saved_prefixes(model, expected):
    groups = make_groups()
    for group, whole in zip(groups, expected, strict=True):
        for sample, source in zip(group.samples, whole.samples, strict=True):
            n = (3 * sample.sample_id.index) % len(source.token_ids)
            sample.token_ids, sample.logprobs = source.token_ids[:n], source.logprobs[:n]
            sample.kept_logmass, sample.versions = source.kept_logmass[:n], source.versions[:n]
    finish(make_generator(model), groups, quantum=3)
    assert_same(groups, expected)


def test_seed_and_stream_change_the_draws(model, expected):
    for options in ({"seed": 4, "stream": "train"}, {"seed": 3, "stream": "eval"}):
        groups = make_groups()
        generator = Generator(
            model,
            SAMPLING,
            max_running_samples=16,
            kv_cache_tokens=0,
            kv_block_tokens=4,
            **options,
        )
        finish(generator, groups)
        pairs = zip(groups, expected, strict=True)
        assert all(g.samples[0].token_ids != e.samples[0].token_ids for g, e in pairs)


# ---------------------------------------------------------------- against the plain forward


@torch.no_grad()
def test_each_token_is_drawn_with_the_noise_of_its_key(model, expected):
    """Position counts from the first sampled token. A change of this breaks every replay."""
    for group in expected:
        for drawn in group.samples:
            ids = group.prompt_ids + drawn.token_ids
            hidden = model(torch.tensor(ids), Rows.whole([len(ids)]))[len(group.prompt_ids) - 1 :]
            logits = model.logits(hidden[:-1]) / SAMPLING.temperature
            n = len(drawn.token_ids)
            key = noise.sample_key(3, "train", *drawn.sample_id)
            uniforms = noise.uniforms(np.full(n, key, dtype=np.uint64), np.arange(n))
            reached = logits.double().softmax(-1).cumsum(-1)
            token_ids = (reached <= torch.from_numpy(uniforms)[:, None]).sum(-1)
            assert token_ids.tolist() == drawn.token_ids


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pack_after", [0, 3])
def test_logprobs_are_those_of_the_plain_forward(temperature, dtype, pack_after, monkeypatch):
    monkeypatch.setattr(packed, "PACK_AFTER", pack_after)
    model = tiny_model(2, dtype).requires_grad_(False)
    groups = make_groups(seed=5)
    sampling = Sampling(temperature=temperature, max_new_tokens=MAX_NEW, top_k=50)
    generator = make_generator(model, sampling, max_running_samples=5)
    finish(generator, groups, quantum=4, between=lambda: generator.pause(keep_kv=False))
    gaps = [
        abs(a - b)
        for sample, row in zip(
            (s for g in groups for s in g.samples),
            forward_logprobs(model, groups, temperature),
            strict=True,
        )
        for a, b in zip(sample.logprobs, row, strict=True)
    ]
    print(f"{attention.kernel_name()}: largest gap {max(gaps)}")
    assert max(gaps) <= (0 if EXACT else 1e-5 if dtype == torch.float32 else 0.05)


def test_a_prompt_is_computed_once_for_its_group(model):
    n_prompts = [40, 21]
    groups = [make_group(i, n, 6) for i, n in enumerate(n_prompts)]
    quanta = finish(make_generator(model, max_running_samples=12), groups)
    assert sum(q.prefill_tokens for q in quanta) == sum(n - 1 for n in n_prompts)


def test_late_samples_find_their_prompt_in_the_cache(model):
    """Two lanes, six samples; one starts half done, so that one of the group is always running."""
    group = make_group(0, 40, 6)
    give_prefix(group.samples[3], 6)
    sampling = Sampling(max_new_tokens=MAX_NEW)
    quanta = finish(make_generator(model, sampling, max_running_samples=2), [group], quantum=5)
    assert sum(q.prefill_tokens for q in quanta) == 39 + 6


def test_one_step_starts_no_more_rows_than_its_limit(model, expected, monkeypatch):
    monkeypatch.setattr(lanes, "PREFILL_ROWS", 40)
    groups = make_groups()
    generator = make_generator(model)
    fed = []
    forward = generator._forward
    generator._forward = lambda active, n_fed: (fed.append(n_fed), forward(active, n_fed))[1]
    finish(generator, groups)
    assert max(fed) <= 40 + 13 and fed[0] <= 40 < sum(fed)
    assert_same(groups, expected)


# ---------------------------------------------------------------- changed weights


def change_weights(model, generator, version, dtype):
    model.load_state_dict(tiny_model(100 + version, dtype).state_dict())
    generator.version = version


def give_prefix(sample, n):
    """As if it came out of the record, half done under version 0."""
    sample.token_ids, sample.logprobs = [5] * n, [-1.0] * n
    sample.kept_logmass, sample.versions = [0.0] * n, [0] * n


def run_across_an_update(keep_kv, n_lanes=16, n_prefix=0, dtype=torch.float32):
    """Groups half done under version 0 and half under 1, with what they had at the change."""
    model = tiny_model(1, dtype).requires_grad_(False)
    sampling = Sampling(max_new_tokens=MAX_NEW)
    generator = make_generator(model, sampling, max_running_samples=n_lanes)
    groups = [make_group(0, 19, 3), make_group(1, 5, 3)]
    give_prefix(groups[0].samples[1], n_prefix)
    generator.admit(groups)
    generator.run(4)
    generator.pause(keep_kv)
    n_old = {s.sample_id: len(s.token_ids) for g in groups for s in g.samples}
    change_weights(model, generator, 1, dtype)
    while generator.unfinished:
        generator.run(3)
        generator.check_integrity()
    return model, groups, n_old


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recompute_after_an_update_is_a_fresh_prefill(dtype, monkeypatch):
    """In bfloat16 also for decode copies of the weights, which are made before and after."""
    monkeypatch.setattr(packed, "PACK_AFTER", 0)
    model, groups, n_old = run_across_an_update(keep_kv=False, dtype=dtype)
    rows = iter(forward_logprobs(model, groups, 1.0))
    for group in groups:
        for sample in group.samples:
            n, new = n_old[sample.sample_id], next(rows)
            assert n == 4 and sample.versions == [0] * n + [1] * (MAX_NEW - n)
            tolerance = 0 if EXACT else 1e-5 if dtype == torch.float32 else 0.05
            assert sample.logprobs[n:] == pytest.approx(new[n:], rel=0, abs=tolerance)
            # the tokens before the update keep what they were sampled with
            assert max(abs(a - b) for a, b in zip(sample.logprobs[:n], new[:n], strict=True)) > 0.1


@torch.no_grad()
def test_keep_goes_on_with_the_old_keys():
    _, groups, n_old = run_across_an_update(keep_kv=True)
    model = tiny_model(1).requires_grad_(False)
    recomputed = run_across_an_update(keep_kv=False)[1]
    for group, other in zip(groups, recomputed, strict=True):
        for sample, twin in zip(group.samples, other.samples, strict=True):
            n = n_old[sample.sample_id]
            ids = group.prompt_ids + sample.token_ids
            n_keys = len(group.prompt_ids) + n
            # by hand: keys of all but the last token under the old weights, that one under the new
            model.load_state_dict(tiny_model(1).state_dict())
            cache = SimpleCache.of(model, n_keys)
            slots = torch.arange(n_keys)
            old = Rows.build([n_keys - 1], [0], [slots.numpy()])
            model(torch.tensor(ids[: n_keys - 1]), old, cache, slots[:-1])
            model.load_state_dict(tiny_model(101).state_dict())
            last = Rows.build([1], [n_keys - 1], [slots.numpy()])
            hidden = model(torch.tensor(ids[n_keys - 1 : n_keys]), last, cache, slots[-1:])
            logits = model.logits(hidden.expand(2, -1))
            target = torch.tensor(ids[n_keys : n_keys + 1] * 2)
            by_hand = token_logprobs(logits, target, 1.0)[0].item()
            assert sample.logprobs[n] == pytest.approx(by_hand, abs=1e-5)
            assert sample.versions == [0] * n + [1] * (MAX_NEW - n)
            assert sample.token_ids[:n] == twin.token_ids[:n]
            assert abs(sample.logprobs[n] - twin.logprobs[n]) > 1e-3


def test_no_sample_starts_from_a_prompt_of_older_weights():
    """Two lanes, and two samples of group 0 run when the weights change. One ends soon after, and
    the third starts while the other still holds the prompt's old keys."""
    model, groups, n_old = run_across_an_update(keep_kv=True, n_lanes=2, n_prefix=6)
    assert n_old[0, 0] == 4 and n_old[0, 1] == 10
    rows = iter(forward_logprobs(model, groups, 1.0))
    late = 0
    for group in groups:
        for sample in group.samples:
            new = next(rows)
            if n_old[sample.sample_id] == 0:
                late += 1
                assert set(sample.versions) == {1}
                assert sample.logprobs == pytest.approx(new, abs=0 if EXACT else 1e-5)
    assert late == 4


# ---------------------------------------------------------------- ends, order, refusals


def test_stop_ids_and_length(model):
    free = make_group(0, 9, 4)
    finish(make_generator(model, Sampling(max_new_tokens=MAX_NEW)), [free])
    assert all(s.finish_reason == "length" for s in free.samples)
    assert all(len(s.token_ids) == MAX_NEW for s in free.samples)
    stop = free.samples[2].token_ids[5]
    stopped = make_group(0, 9, 4)
    finish(make_generator(model, Sampling(max_new_tokens=MAX_NEW, stop_ids=(stop,))), [stopped])
    for sample, whole in zip(stopped.samples, free.samples, strict=True):
        ids = whole.token_ids
        if stop in ids:
            assert sample.finish_reason == "stop"
            assert sample.token_ids == ids[: ids.index(stop) + 1]  # the end token is recorded
        else:
            assert sample.finish_reason == "length" and sample.token_ids == ids
    assert stopped.samples[2].finish_reason == "stop"


def test_an_end_token_at_the_limit_is_a_stop(model):
    free = make_group(0, 9, 1)
    finish(make_generator(model, Sampling(max_new_tokens=3)), [free])
    last = free.samples[0].token_ids[-1]
    group = make_group(0, 9, 1)
    finish(make_generator(model, Sampling(max_new_tokens=3, stop_ids=(last,))), [group])
    assert group.samples[0].finish_reason == "stop"


def order_of_finishing(model, groups, **options):
    generator = make_generator(model, Sampling(max_new_tokens=6), **options)
    quanta = finish(generator, groups)
    return [s.sample_id for q in quanta for s in q.finished]


def test_earliest_deadline_first(model):
    groups = [make_group(0, 4, 1, 3), make_group(1, 4, 2, 1), make_group(2, 4, 1, 2)]
    order = order_of_finishing(model, groups, max_running_samples=1)
    assert order == [(1, 0), (1, 1), (2, 0), (0, 0)]


def test_resumed_before_new_within_a_deadline(model):
    groups = [make_group(0, 4, 1), make_group(1, 4, 2), make_group(2, 4, 1, -1)]
    give_prefix(groups[1].samples[1], 2)
    order = order_of_finishing(model, groups, max_running_samples=1)
    assert order == [(2, 0), (1, 1), (0, 0), (1, 0)]


def test_preemption_takes_the_latest_deadline(model):
    # 6 blocks of 4: each sample comes to need 3, so three of them do not fit
    groups = [make_group(0, 4, 1, 5), make_group(1, 4, 1, 0), make_group(2, 4, 1, 3)]
    generator = make_generator(
        model, Sampling(max_new_tokens=8), kv_cache_tokens=24, max_running_samples=3
    )
    # without the reserve for growth, all three start at once
    generator._lanes._most_positions = lambda: generator._lanes.prompt_tokens
    generator.admit(groups)
    assert generator.run(5).preemptions == 0
    assert [run.group.group_id for run in generator._lanes.runs] == [1, 2, 0]
    assert generator.run(1).preemptions == 1
    assert {run.group.group_id for run in generator._lanes.runs} == {1, 2}
    assert len(groups[0].samples[0].token_ids) == 5
    finish(generator)
    assert all(len(group.samples[0].token_ids) == 8 for group in groups)


def test_what_cannot_be_finished_is_refused_whole(model):
    generator = make_generator(model, kv_cache_tokens=48)
    good = make_group(0, 8, 2)
    with pytest.raises(ValueError, match=r"group 1: a prompt of 501 tokens.*context of 512"):
        generator.admit([good, make_group(1, 501, 2)])
    with pytest.raises(ValueError, match=r"group 2: a prompt of 40.*kv_cache_tokens is 48; raise"):
        generator.admit([good, make_group(2, 40, 2)])
    with pytest.raises(ValueError, match=r"group 3: a prompt of 0 tokens"):
        generator.admit([good, make_group(3, 0, 2)])
    assert generator.unfinished == 0
    generator.admit([make_group(4, 36, 1)])  # exactly fits
    assert generator.unfinished == 1
    finish(generator)


def test_nothing_to_do_is_no_step(model):
    quantum = make_generator(model).run(16)
    assert (quantum.decode_steps, quantum.n_tokens, quantum.chunks) == (0, 0, [])


def test_a_quantum_is_bounded(model):
    generator = make_generator(model, Sampling(max_new_tokens=MAX_NEW), max_running_samples=2)
    generator.admit([make_group(0, 4, 3)])
    quantum = generator.run(5)
    assert (quantum.decode_steps, quantum.n_tokens, generator.unfinished) == (5, 10, 3)


def test_broken_weights_are_named():
    model = tiny_model(1).requires_grad_(False)
    model.final_norm.fill_(float("nan"))
    generator = make_generator(model)
    group = make_group(0, 4, 1)
    generator.admit([group])
    with pytest.raises(FloatingPointError, match="version 0 are not finite"):
        generator.run(1)
    assert group.samples[0].token_ids == []


def test_training_goes_on_with_the_same_model_afterwards():
    model = tiny_model(1)
    finish(make_generator(model), [make_group(0, 4, 2)])
    model(torch.tensor([1, 2, 3]), Rows.whole([3])).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "head")


# ---------------------------------------------------------------- on an accelerator


@pytest.mark.gpu
def test_accelerator_equals_cpu_and_gives_memory_back(model):
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(torch.accelerator.current_accelerator())
    sampling = Sampling(max_new_tokens=MAX_NEW, greedy=True)
    here, there = make_groups(), make_groups()
    finish(make_generator(model, sampling), here, 5)
    twin = tiny_model(1, device=device).requires_grad_(False)
    generator = make_generator(twin, sampling)
    before = None
    for _ in range(3):
        generator.release()
        level = torch.accelerator.memory_allocated()
        assert before is None or level == before, "memory grows with every switch"
        before = level
        generator.admit(make_groups())
        generator.run(2)
        assert torch.accelerator.memory_allocated() > level
        finish(generator)
    generator.release()
    finish(generator, there, 5)
    for a, b in zip(here, there, strict=True):
        for x, y in zip(a.samples, b.samples, strict=True):
            assert x.token_ids == y.token_ids
            assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)
