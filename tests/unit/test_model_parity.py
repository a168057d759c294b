"""The parity chain of every family, in fp32 at torch.testing's default tolerances:
transformers == prefill == decode through a cache == packed forward with a shared prompt."""

import numpy as np
import pytest
import torch

from tiny import FAMILIES, SimpleCache, tiny_model, tiny_spec
from twofold.model import weights
from twofold.model.attention import Rows
from twofold.model.spec import RopeScaling
from twofold.model.transformer import Transformer, rotary_frequencies

SHAPES = {
    "grouped heads": {},
    "tied, one key head": {"tied_embeddings": True, "n_kv_heads": 1, "rope_theta": 1e5},
    "head size of its own": {"head_size": 16, "n_kv_heads": 4},
    "linear rope": {"rope_scaling": RopeScaling("linear", 4.0)},
    **{name: FAMILIES[name] for name in ("llama3", "qwen2", "qwen3")},
}
PROMPT, COMPLETIONS = 7, (5, 1, 4)
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator())


@pytest.fixture(params=SHAPES)
def model(request, device) -> Transformer:
    return tiny_model(11, device=device, **SHAPES[request.param]).requires_grad_(False)


def logits(model, hidden):
    return torch.nn.functional.linear(hidden, model.head_weight)


def sequences(device):
    """A prompt with three completions, as whole sequences of token ids."""
    generator = torch.Generator().manual_seed(12)
    prompt = torch.randint(300, (PROMPT,), generator=generator)
    ends = [torch.randint(300, (n,), generator=generator) for n in COMPLETIONS]
    return [torch.cat([prompt, end]).to(device) for end in ends]


def transformers_logits(model, token_ids):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**model.spec.to_hf_config())
    reference = AutoModelForCausalLM.from_config(config).to(model.device)
    state = weights.hf_views(model)
    if model.spec.tied_embeddings:
        state["lm_head.weight"] = model.embedding
    reference.load_state_dict(state)
    with torch.no_grad():
        return reference(token_ids[None]).logits[0]


def plain_logits(model, token_ids):
    return logits(model, model(token_ids, Rows.whole([len(token_ids)], model.device)))


def test_plain_forward_equals_transformers(model, device):
    for ids in sequences(device):
        torch.testing.assert_close(plain_logits(model, ids), transformers_logits(model, ids))


def test_decode_through_a_cache_equals_plain_forward(model, device):
    """Two sequences: prefilled in pieces, then one token at a time, slots in no order."""
    first, second, _ = sequences(device)
    slots = np.random.default_rng(13).permutation(40)
    keys = [slots[:20], slots[20:]]
    cache = SimpleCache.of(model, 40)
    got = [[], []]

    def forward(spans):
        """spans: (sequence, begin, end) rows of one call."""
        rows = Rows.build(
            [end - begin for _, begin, end in spans],
            [begin for _, begin, _ in spans],
            [keys[s][:end] for s, _, end in spans],
            device,
        )
        ids = torch.cat([(first, second)[s][begin:end] for s, begin, end in spans])
        write = torch.from_numpy(np.concatenate([keys[s][b:e] for s, b, e in spans])).to(device)
        out = logits(model, model(ids, rows, cache, write))
        for (s, _, _), part in zip(spans, out.split([e - b for _, b, e in spans]), strict=True):
            got[s].append(part)

    forward([(0, 0, 4), (1, 0, 7)])
    forward([(0, 4, 7)])
    forward([(0, 7, 8), (1, 7, 8)])
    for position in range(8, len(first)):
        forward([(0, position, position + 1)])
    torch.testing.assert_close(torch.cat(got[0]), plain_logits(model, first))
    torch.testing.assert_close(torch.cat(got[1]), plain_logits(model, second))


def packed_group(device):
    """The prompt once, then the completions' own rows; which rows each whole sequence is."""
    whole = sequences(device)
    starts = PROMPT + np.cumsum((0, *COMPLETIONS[:-1]))
    own = [np.arange(a, a + n) for a, n in zip(starts, COMPLETIONS, strict=True)]
    keys = [np.arange(PROMPT), *(np.r_[np.arange(PROMPT), rows] for rows in own)]
    rows = Rows.build([PROMPT, *COMPLETIONS], [0] + [PROMPT] * len(own), keys, device)
    ids = torch.cat([whole[0][:PROMPT], *(sequence[PROMPT:] for sequence in whole)])
    return ids, rows, keys[1:]


def test_packed_group_equals_plain_forward(model, device):
    ids, rows, members = packed_group(device)
    packed = logits(model, model(ids, rows))
    for sequence, member in zip(sequences(device), members, strict=True):
        torch.testing.assert_close(packed[torch.from_numpy(member)], plain_logits(model, sequence))


def cross_entropy(logits, sequence):
    """Of the completion's tokens, predicted from one row earlier."""
    return torch.nn.functional.cross_entropy(logits[PROMPT - 1 : -1], sequence[PROMPT:])


def test_packed_gradients_equal_plain_gradients(model, device):
    """Cross-entropy of all completions: equal within 1e-6 of the largest entry. (In fp64 the two
    agree to 1e-15; in fp32 a residual stream of unit size keeps the rounding well below 1e-6.)"""
    model.embedding.mul_(4)
    model.requires_grad_(True)
    ids, rows, members = packed_group(device)
    packed = logits(model, model(ids, rows))
    losses = [
        cross_entropy(packed[torch.from_numpy(member)], sequence)
        for sequence, member in zip(sequences(device), members, strict=True)
    ]
    sum(losses).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for sequence in sequences(device):
        cross_entropy(plain_logits(model, sequence), sequence).backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_forward_is_near_fp32(family, device):
    narrow = tiny_model(11, torch.bfloat16, device, **FAMILIES[family]).requires_grad_(False)
    wide = tiny_model(11, device=device, **FAMILIES[family]).requires_grad_(False)
    ids = sequences(device)[0]
    out = narrow(ids, Rows.whole([len(ids)], device))
    assert out.dtype == torch.bfloat16
    exact = wide(ids, Rows.whole([len(ids)], device))
    assert (out.float() - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_neighbours(family, dtype, threads):
    """The part of bit-exactness that is the decoder's own, on a CPU: a sequence's hidden states
    are the same bits alone and beside others (row counts that are multiples of 8, from 16 on)."""
    model = tiny_model(14, dtype, **FAMILIES[family]).requires_grad_(False)
    ids = torch.randint(300, (48,), generator=torch.Generator().manual_seed(15))
    together = model(ids, Rows.whole([16, 8, 24]))
    assert torch.equal(together[:16], model(ids[:16], Rows.whole([16])))
    assert torch.equal(together[24:], model(ids[24:], Rows.whole([24])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_biased_projection_are_the_same_for_any_number_of_rows(dtype, threads):
    """F.linear with a bias at the shape of Qwen2.5-0.5B: what bit-exactness needs of torch."""
    generator = torch.Generator().manual_seed(16)
    weight = (torch.randn(1152, 896, generator=generator) / 30).to(dtype)
    bias = torch.randn(1152, generator=generator).to(dtype)
    x = torch.randn(512, 896, generator=generator).to(dtype)
    everything = torch.nn.functional.linear(x, weight, bias)
    for n in (16, 24, 32, 40, 72, 128, 161, 200, 256):
        assert torch.equal(torch.nn.functional.linear(x[:n], weight, bias), everything[:n]), n


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_stretched_frequencies_of_llama_3_are_transformers(factor):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = tiny_spec(head_size=128, rope_theta=5e5, rope_scaling=RopeScaling("llama3", factor))
    expected = LlamaRotaryEmbedding(LlamaConfig(**spec.to_hf_config())).inv_freq
    ours = rotary_frequencies(spec)
    assert torch.equal(ours, expected)
    ratio = rotary_frequencies(tiny_spec(head_size=128, rope_theta=5e5)) / ours
    assert ratio[0] == 1 and ratio[-1] == factor and ((ratio > 1) & (ratio < factor)).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_gains_and_biases_have_one_dimension(family):
    """By which the optimizer exempts them from weight decay."""
    model = tiny_model(**FAMILIES[family])
    for name, parameter in model.named_parameters():
        assert (parameter.ndim == 1) == name.endswith(("norm", "bias")), name
