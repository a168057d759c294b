"""The shape of a decoder, as plain data.

Owns: `ModelSpec`, its reading from and writing to a Hugging Face `config.json`, and the arithmetic
on it (parameters, cache bytes). Does not own: tensors (`transformer`), files (`weights`).
Importable without torch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What a family's config.json may ask for and this decoder does not compute.
_REFUSED = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen2": ("use_sliding_window",),
    "qwen3": ("attention_bias", "use_sliding_window"),
}


@dataclass(frozen=True)
class RopeScaling:
    """How a context longer than the pretrained one stretches the rotary frequencies.

    `kind` "linear": all are divided by `factor`. "llama3" (Llama 3.1 and later): those that make
    fewer than `low_freq_factor` turns within `original_context_tokens` are divided by `factor`,
    those that make more than `high_freq_factor` stay, between them it is interpolated.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192

    @classmethod
    def from_hf(cls, rope: dict[str, Any], context_tokens: int) -> RopeScaling | None:
        """Reads `rope_scaling` or `rope_parameters`; None for plain rotary positions. ValueError
        for another kind."""
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return None
        if kind == "linear":
            return cls("linear", _number(rope, "factor"))
        if kind == "llama3":
            return cls(
                "llama3",
                _number(rope, "factor"),
                _number(rope, "low_freq_factor"),
                _number(rope, "high_freq_factor"),
                _size(rope, "original_max_position_embeddings", context_tokens),
            )
        raise ValueError(f"config.json: rope_type is {kind!r}; supported: default, linear, llama3")

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` of a config.json."""
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            scaling |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_context_tokens,
            }
        return scaling


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: grouped-query attention, rotary positions, gated feed-forward with SiLU, RMS
    norms. `family` is "llama", "qwen2" or "qwen3"; what they differ in are properties here."""

    vocab_size: int
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    ff_width: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    context_tokens: int
    family: str = "llama"
    rope_scaling: RopeScaling | None = None

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias (no other projection has one)."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are RMS-normalised before they are rotated."""
        return self.family == "qwen3"

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_size

    @property
    def n_parameters(self) -> int:
        attention = self.width * (self.qkv_width + self.n_heads * self.head_size)
        attention += self.qkv_width * self.qkv_bias + 2 * self.head_size * self.qk_norm
        layer = attention + 3 * self.width * self.ff_width + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tied_embeddings else 2)
        return embeddings + self.n_layers * layer + self.width

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token occupies in all layers' caches."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_size * dtype_bytes

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelSpec:
        """Reads a parsed `config.json`. ValueError for what this decoder does not compute."""
        family = _family(config)
        n_heads, n_kv_heads = _head_counts(config)
        context_tokens = _size(
            {"max_position_embeddings": 2048} | config, "max_position_embeddings"
        )
        # as transformers 5 does: the older field comes first
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        theta = config if rope.get("rope_theta") is None else rope
        return cls(
            vocab_size=_size(config, "vocab_size"),
            width=_size(config, "hidden_size"),
            n_layers=_size(config, "num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_size=_head_size(config, family),
            ff_width=_size(config, "intermediate_size"),
            rope_theta=_number(theta, "rope_theta", 10_000.0),
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            context_tokens=context_tokens,
            family=family,
            rope_scaling=RopeScaling.from_hf(rope, context_tokens),
        )

    def to_hf_config(self) -> dict[str, Any]:
        """The `config.json` that describes this decoder, without dtype and token ids.

        Rotary positions are written twice: `rope_parameters` (transformers 5), and `rope_theta`
        with `rope_scaling` (what came before it).
        """
        scaling = self.rope_scaling.to_hf() if self.rope_scaling else {}
        rope = {"rope_type": "default", "rope_theta": self.rope_theta} | scaling
        return {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.ff_width,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling or None,
            "rope_parameters": rope,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.context_tokens,
            **dict.fromkeys(_REFUSED[self.family], False),
        }


def _family(config: dict[str, Any]) -> str:
    """The decoder's family. ValueError for one, or a part of one, that is not computed here."""
    family = config.get("model_type")
    if family not in list(_ARCHITECTURES):  # a list: what JSON holds need not be hashable
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"config.json: model_type is {family!r}; supported: {known}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act is {activation!r}; only 'silu' is supported")
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"config.json: {field} is {rope!r}, an object or null is needed")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"config.json: {field} has a partial_rotary_factor; not supported")
    for flag in _REFUSED[family]:
        if config.get(flag):
            raise ValueError(f"config.json: {flag} is true; not supported for {family} models")
    return str(family)


def _head_counts(config: dict[str, Any]) -> tuple[int, int]:
    """Query heads, and key and value heads."""
    n_heads = _size(config, "num_attention_heads")
    n_kv_heads = _size(config, "num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads is {n_heads}, a multiple of num_key_value_heads "
            f"({n_kv_heads}) is needed"
        )
    return n_heads, n_kv_heads


def _head_size(config: dict[str, Any], family: str) -> int:
    width, n_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if family == "qwen3":  # its head size is independent of the width
        size = _size(config, "head_dim")
    elif config.get("head_dim") is None and width % n_heads:
        raise ValueError(
            f"config.json: hidden_size is {width}, a multiple of num_attention_heads ({n_heads}) "
            "is needed where there is no head_dim"
        )
    else:
        size = _size(config, "head_dim", width // n_heads)
    if size % 2:
        raise ValueError(
            f"config.json: heads of size {size} (head_dim, or hidden_size / num_attention_heads) "
            "have no rotary positions; an even number is needed"
        )
    return size


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number above 0; `default`, if given, in the place of null or nothing."""
    size = config.get(name)
    if size is None and default is not None:
        return default
    if type(size) is not int or size < 1:
        raise ValueError(f"config.json: {name} is {size!r}, a whole number above 0 is needed")
    return size


def _number(config: dict[str, Any], name: str, default: float | None = None) -> float:
    """A finite number above 0; `default`, if given, in the place of null or nothing."""
    number: Any = config.get(name)
    if number is None and default is not None:
        return default
    if type(number) not in (int, float) or not 0 < number <= sys.float_info.max:
        raise ValueError(f"config.json: {name} is {number!r}, a number above 0 is needed")
    return float(number)
