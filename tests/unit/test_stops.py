"""Stop strings: seen at the token that completes one, whatever tokens it is made of."""

import random

import pytest
from tests.tiny import EOS, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from twofold.step.generate import Generator
from twofold.step.prompts import decode_completion
from twofold.step.sampling import Sampling
from twofold.step.stops import StopStrings
from twofold.types import Group, Prompt, Sample, SampleId


def byte_level() -> PreTrainedTokenizerFast:
    """As of GPT-2, Llama 3, Qwen: every token is some bytes; ids above the vocabulary exist."""
    specials = ["<|bos|>", "<|im_end|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(), additional_special_tokens=specials
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """As of Llama 2: spaces are part of words, the first one is dropped, and characters without a
    token of their own are bytes, of which one that is out of place spoils its neighbours."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["▁", "▁the", "▁END", "END", "a", "b", "▁a", ".", "N", "D", "E"]
    raw = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def naive_end(tokenizer, ids, texts):
    """Number of tokens after which the whole text contains a stop string; 0: never."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], skip_special_tokens=True)
        if any(stop in text for stop in texts):
            return n
    return 0


def end(stops, ids):
    return next((n for n in range(1, len(ids) + 1) if stops.reached(ids[:n])), 0)


def random_ids(rng, tokenizer, texts):
    """Words, bytes of characters (whole or not), specials and unknown ids, and now and then a part
    of a stop string, or all of it, in single bytes or in words."""
    by_byte = {}
    for token, i in tokenizer.get_vocab().items():
        decoded = tokenizer.decode([i])
        if len(decoded) == 1 and ord(decoded) < 128:
            by_byte[ord(decoded)] = i
        if token.startswith("<0x"):
            by_byte[int(token[3:5], 16)] = i
    if tokenizer is TOKENIZERS["byte_level"]:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        symbols = {b: chr(b) for b in printable}
        symbols |= {b: chr(256 + i) for i, b in enumerate(others)}
        by_byte = {b: tokenizer.convert_tokens_to_ids(s) for b, s in symbols.items()}
    ids = []
    while len(ids) < 60:
        kind = rng.randrange(6)
        if kind == 0:
            ids += [rng.randrange(len(tokenizer) + 3)]
        elif kind == 1:
            ids += [rng.choice(tokenizer.all_special_ids)]
        elif kind == 2:
            ids += [
                by_byte[b] for b in rng.choice(["é", "好", "😀"]).encode()[: rng.choice([1, 4])]
            ]
        elif kind == 3:
            ids += [by_byte[b] for b in ("好" * rng.randrange(9)).encode()]
        else:
            stop = rng.choice(texts)
            part = stop[: rng.randrange(1, len(stop) + 1)]
            if rng.randrange(2):
                ids += [by_byte[b] for b in part.encode()]
            else:
                ids += tokenizer(part, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("texts", [["\n\n"], ["END", " a"], ["好😀b", "é"], ["the answer is"]])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_is_seen_when_a_look_at_the_whole_text_sees_it(kind, texts):
    tokenizer = TOKENIZERS[kind]
    stops = StopStrings(tokenizer, texts)
    n_stopped = 0
    for seed in range(60):
        ids = random_ids(random.Random(seed), tokenizer, texts)
        expected = naive_end(tokenizer, ids, texts)
        assert end(stops, ids) == expected, f"seed {seed}"
        n_stopped += expected > 0
    assert n_stopped > 5


def test_a_long_completion_costs_no_more_than_a_short_one(monkeypatch):
    tokenizer = TOKENIZERS["byte_level"]
    stops = StopStrings(tokenizer, ["\n\n"])
    n_decoded = []
    monkeypatch.setattr(
        type(tokenizer), "decode", lambda self, ids, **options: n_decoded.append(len(ids)) or "x"
    )
    word = tokenizer("answer", add_special_tokens=False)["input_ids"]
    ids = []
    for i in range(2000):
        ids.append(word[i % len(word)])
        assert not stops.reached(ids)
    assert max(n_decoded) <= len("\n\n") + 4


def test_the_text_ends_before_the_first_stop():
    tokenizer = TOKENIZERS["byte_level"]
    stops = StopStrings(tokenizer, ["END", "\n\n"])
    ids = tokenizer("number 4\n\nor END", add_special_tokens=False)["input_ids"]
    assert decode_completion(tokenizer, ids, (EOS,), stops) == "number 4"
    assert decode_completion(tokenizer, [*ids[:2], EOS], (EOS,), stops) == tokenizer.decode(ids[:2])
    assert stops.cut("no stop") == "no stop" and stops.cut("END") == ""


@pytest.mark.parametrize("quantum", [1, 3, 100])
def test_generation_stops_and_keeps_the_sampled_ids(quantum):
    """The same tokens as without stop strings, up to the one that completed the first, however
    often generation is interrupted."""
    model, tokenizer = tiny_model(), TOKENIZERS["byte_level"]

    def generated(stop_strings, quantum):
        samples = [Sample(SampleId(0, i)) for i in range(8)]
        sampling = Sampling(max_new_tokens=24, stop_strings=stop_strings)
        generator = Generator(
            model, sampling, seed=1, stream="train", max_running_samples=3, kv_cache_tokens=0,
            kv_block_tokens=4,
        )  # fmt: skip
        generator.admit([Group(0, Prompt("?"), [5, 6, 7], 0, 0, samples)])
        chunks = []
        while generator.unfinished:
            chunks += generator.run(quantum).chunks
            generator.pause(keep_kv=False)
        for sample in samples:
            ids = [i for c in chunks if c.sample_id == sample.sample_id for i in c.token_ids]
            assert ids == sample.token_ids
        return samples

    free = generated(None, 100)
    texts = [tokenizer.decode(sample.token_ids) for sample in free]
    first = next(text for text in texts if len(text) > 8)
    stops = StopStrings(tokenizer, [first[3:6], "e"])
    stopped = generated(stops, quantum)
    reasons = set()
    for sample, whole in zip(stopped, free, strict=True):
        n = naive_end(tokenizer, whole.token_ids, stops.texts)
        assert sample.token_ids == whole.token_ids[: n or 24]
        assert sample.finish_reason == ("stop" if n else "length")
        reasons.add(sample.finish_reason)
    assert "stop" in reasons
