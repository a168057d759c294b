"""Tiny random models and folders, so that tests of the whole path run in seconds.

`tiny_spec()`, `tiny_model(seed)`, `tiny_folder(path)`, `SimpleCache`; `FAMILIES`: what to give them
for each family, as in `tiny_model(3, **FAMILIES["qwen2"])`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from twofold.model import weights
from twofold.model.spec import ModelSpec, RopeScaling
from twofold.model.transformer import Transformer

VOCAB = 300
SPECIALS = ("<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>")
PAD, BOS, EOS, IM_START = range(4)  # their ids; EOS ends a chat turn
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    # of the four frequencies one is kept, one interpolated, two are divided
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, original_context_tokens=64)},
    "qwen2": {"family": "qwen2", "tied_embeddings": True},
    "qwen3": {"family": "qwen3", "head_size": 16},
}


def tiny_spec(**changes: Any) -> ModelSpec:
    """A Llama of two layers, width 32, 4 query heads over 2 key heads of size 8, untied; or what
    `changes` make of it."""
    spec = ModelSpec(
        vocab_size=VOCAB,
        width=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_size=8,
        ff_width=64,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tied_embeddings=False,
        context_tokens=512,
    )
    return replace(spec, **changes)


def tiny_model(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **changes: Any,
) -> Transformer:
    """A random model, the same for the same seed on every device. Norm gains are around 1."""
    model = Transformer(tiny_spec(**changes), dtype, device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            gain = name.endswith("norm")
            scale = 0.1 if gain else parameter.shape[-1] ** -0.5
            parameter.copy_(values * scale + (1.0 if gain else 0.0))
    return model


@dataclass
class SimpleCache:
    """Keys and values [n_layers, n_slots, kv_heads, head_size] without any allocation policy."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, model: Transformer, n_slots: int) -> SimpleCache:
        spec = model.spec
        shape = (spec.n_layers, n_slots, spec.n_kv_heads, spec.head_size)
        options = {"dtype": model.dtype, "device": model.device}
        return cls(torch.zeros(shape, **options), torch.zeros(shape, **options))


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with VOCAB entries: the specials, all bytes, some merges. Any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "user assistant system What is the answer? Reply with only the number. number answer"
    tokenizer.train_from_iterator([text] * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def tiny_folder(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A complete Hugging Face folder at `path` (made if needed): `tiny_model(seed, **changes)` in
    fp32, its config, the tiny tokenizer with a chat template. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    model = tiny_model(seed, **changes)
    weights.write_weights(model, path)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    weights.write_json(path / "config.json", model.spec.to_hf_config() | ids | {"dtype": "float32"})
    weights.write_json(path / "generation_config.json", ids)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    config = names | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    weights.write_json(path / "tokenizer_config.json", config)
    return path
