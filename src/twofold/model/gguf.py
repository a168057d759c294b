"""GGUF files: one is converted into a Hugging Face folder.

Owns: reading metadata, tokenizer and (dequantised) tensors of a llama.cpp model file. Does not own:
where the file comes from and where the folder goes (`resolve`), the folder's format (`weights`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from twofold.model import weights
from twofold.model.spec import ModelSpec
from twofold.model.transformer import Transformer

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # token_type of special tokens in GGUF


def convert(path: Path, folder: Path) -> None:
    """Writes the model of the GGUF file `path` into the existing `folder`: fp32 weights (the exact
    dequantised values), config, tokenizer with chat template. ValueError if the file is broken, is
    no Llama decoder or has a tokenizer of a kind not known here."""
    try:
        reader = GGUFReader(path)
    except Exception as error:  # it raises whatever numpy stumbles over
        raise ValueError(
            f"{path}: not a complete GGUF file ({weights.first_line(error)}); fetch it again"
        ) from None
    spec = _spec(reader, path)
    tokenizer = _tokenizer(reader, path)
    weights.write_weights(_model(reader, spec, path), folder)
    ids = {
        f"{ours}_token_id": int(_field(reader, f"tokenizer.ggml.{theirs}_token_id"))
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{theirs}_token_id" in reader.fields
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    weights.write_json(folder / "tokenizer_config.json", _tokenizer_config(reader, tokenizer, ids))
    weights.write_json(folder / "generation_config.json", dict(ids))
    config = spec.to_hf_config() | ids | {"dtype": "float32"}
    weights.write_json(folder / "config.json", config)


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def _spec(reader: GGUFReader, path: Path) -> ModelSpec:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: architecture is {architecture!r}; only 'llama' is supported")
    if "llama.rope.scaling.type" in reader.fields:
        kind = _field(reader, "llama.rope.scaling.type")
        if kind != "none":
            raise ValueError(f"{path}: rope scaling is {kind!r}; only plain rotary is supported")

    def number(name: str) -> Any:
        if f"llama.{name}" not in reader.fields:
            raise ValueError(f"{path}: the metadata lack llama.{name}")
        return _field(reader, f"llama.{name}")

    n_heads, width = number("attention.head_count"), number("embedding_length")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    eps = np.float32(number("attention.layer_norm_rms_epsilon"))
    return ModelSpec(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        width=width,
        n_layers=number("block_count"),
        n_heads=n_heads,
        n_kv_heads=number("attention.head_count_kv"),
        head_size=number("rope.dimension_count"),
        ff_width=number("feed_forward_length"),
        rope_theta=float(number("rope.freq_base")),
        norm_eps=float(str(eps)),  # 1e-05 was stored in fp32; the nearest short decimal is meant
        tied_embeddings="output.weight" not in tensors,
        context_tokens=number("context_length"),
    )


def _model(reader: GGUFReader, spec: ModelSpec, path: Path) -> Transformer:
    model = Transformer(spec, torch.float32)
    missing = weights.hf_views(model)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").split(".")[-1]
        if kind in ("attn_q", "attn_k"):
            values = _hf_rotary_order(values, spec.n_heads if kind == "attn_q" else spec.n_kv_heads)
        target = missing.pop(_hf_name(tensor.name), None)
        if target is None:
            raise ValueError(f"{path}: tensor {tensor.name} has no place in a Llama decoder")
        assert target.shape == values.shape, tensor.name
        target.copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
    if missing:
        raise ValueError(f"{path}: the weights lack {next(iter(missing))}")
    return model


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names unchanged."""
    parts = name.removesuffix(".weight").split(".")
    known = _NAMES.get(parts[-1], parts[-1])
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{known}.weight"


def _hf_rotary_order(values: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp stores the rows of a head in pairs (0, half, 1, half + 1, ...), because it rotates
    neighbours; Hugging Face rotates row i with row i + half."""
    rows, columns = values.shape
    paired = values.reshape(n_heads, rows // n_heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(reader: GGUFReader, path: Path) -> Tokenizer:
    """Byte-level BPE as the metadata describe it, special tokens split off first."""
    kind, splitting = (_field(reader, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters: dict[str, pre_tokenizers.PreTokenizer] = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level]),
    }
    if kind != "gpt2" or splitting not in splitters:
        known = ", ".join(f"gpt2/{name}" for name in splitters)
        raise ValueError(f"{path}: tokenizer {kind}/{splitting} is not supported; known: {known}")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = splitters[splitting]
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(
    reader: GGUFReader, tokenizer: Tokenizer, ids: dict[str, int]
) -> dict[str, Any]:
    names = {key.removesuffix("_id"): tokenizer.id_to_token(id_) for key, id_ in ids.items()}
    config = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
    }
    if "tokenizer.chat_template" in reader.fields:
        config["chat_template"] = _field(reader, "tokenizer.chat_template")
    return config
