"""Every family in generation: the text of transformers, and the log-probs of training."""

import pytest
import torch

from tiny import EOS, FAMILIES, tiny_folder, tiny_model
from twofold.model import attention, weights
from twofold.model.attention import Rows
from twofold.step.generate import Generator
from twofold.step.logprob import chunked_logprobs
from twofold.step.sampling import Sampling
from twofold.types import Group, Prompt, Sample, SampleId

EXACT = attention.kernel_name() == "cpu kernel"  # else attention depends on the batch by rounding


def generated(model, prompts, sampling):
    """One completion a prompt, all decoded together through the generator's cache."""
    limits = {"max_running_samples": 4, "kv_cache_tokens": 0, "kv_block_tokens": 4}
    generator = Generator(model, sampling, seed=3, stream="train", **limits)
    groups = [
        Group(i, Prompt("?"), ids, 0, 0, [Sample(SampleId(i, 0))]) for i, ids in enumerate(prompts)
    ]
    generator.admit(groups)
    generator.run(100)
    assert not generator.unfinished
    return [group.samples[0] for group in groups]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_a_saved_folder_is_that_of_transformers(tmp_path, family):
    from transformers import AutoModelForCausalLM

    source = tiny_folder(tmp_path / "source", seed=2, **FAMILIES[family])
    saved = tmp_path / "saved"
    weights.save_model(weights.load_model(source, torch.float32), saved, source)
    tokenizer = weights.load_tokenizer(saved)
    prompts = [tokenizer(text)["input_ids"] for text in ("What is 2 + 3?", "7", "number " * 9)]
    sampling = Sampling(max_new_tokens=16, stop_ids=(EOS,), greedy=True)
    samples = generated(weights.load_model(saved, torch.float32), prompts, sampling)
    reference = AutoModelForCausalLM.from_pretrained(saved)
    for prompt, sample in zip(prompts, samples, strict=True):
        out = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)
        assert sample.token_ids == out[0, len(prompt) :].tolist()
        assert tokenizer.decode(sample.token_ids) == tokenizer.decode(out[0, len(prompt) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_generation_are_those_of_a_plain_forward(family, dtype):
    """Bit for bit where the compiled kernel is there."""
    model = tiny_model(4, dtype, **FAMILIES[family]).requires_grad_(False)
    prompts = [[9, 40, 250], [77] * 11, [31]]
    samples = generated(model, prompts, Sampling(temperature=0.7, max_new_tokens=16, stop_ids=()))
    whole = [prompt + sample.token_ids for prompt, sample in zip(prompts, samples, strict=True)]
    ids = torch.tensor([token for tokens in whole for token in tokens])
    hidden = model(ids, Rows.whole([len(tokens) for tokens in whole]))
    logprobs, _ = chunked_logprobs(hidden[:-1], model.head_weight, ids[1:], 0.7)
    ends = torch.tensor([len(tokens) for tokens in whole]).cumsum(0)
    got = torch.tensor([sample.logprobs for sample in samples])
    expected = torch.stack([logprobs[end - 17 : end - 1] for end in ends])
    if EXACT:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 if dtype.itemsize == 4 else 0.1)
