"""The shape of a decoder, as plain data.

Owns: `ModelSpec`, its reading from and writing to a Hugging Face `config.json`, and the arithmetic
on it (parameters, cache bytes). Does not own: tensors (`transformer`), files (`weights`).
Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_REFUSED_BIASES = ("attention_bias", "mlp_bias")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama family: grouped-query attention, rotary positions, gated feed-forward
    with SiLU, RMS norms, no biases."""

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

    @property
    def qkv_width(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_size

    @property
    def n_parameters(self) -> int:
        attention = self.width * (self.qkv_width + self.n_heads * self.head_size)
        layer = attention + 3 * self.width * self.ff_width + 2 * self.width
        embeddings = self.vocab_size * self.width * (1 if self.tied_embeddings else 2)
        return embeddings + self.n_layers * layer + self.width

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token occupies in all layers' caches."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_size * dtype_bytes

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelSpec:
        """Reads a parsed `config.json`. ValueError for what this decoder does not compute."""
        _refuse_unsupported(config)
        n_heads = _required(config, "num_attention_heads")
        width = _required(config, "hidden_size")
        return cls(
            vocab_size=_required(config, "vocab_size"),
            width=width,
            n_layers=_required(config, "num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=config.get("num_key_value_heads") or n_heads,
            head_size=config.get("head_dim") or width // n_heads,
            ff_width=_required(config, "intermediate_size"),
            rope_theta=_rope_theta(config),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            context_tokens=config.get("max_position_embeddings", 2048),
        )

    def to_hf_config(self) -> dict[str, Any]:
        """The `config.json` that describes this decoder, without dtype and token ids.

        The rotary base is written both ways: `rope_parameters` (transformers 5) and `rope_theta`.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.ff_width,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.context_tokens,
            "attention_bias": False,
            "mlp_bias": False,
        }


def _required(config: dict[str, Any], name: str) -> int:
    if not isinstance(config.get(name), int):
        raise ValueError(f"config.json: {name} is {config.get(name)!r}, a whole number is needed")
    return int(config[name])


def _rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _refuse_unsupported(config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type != "llama":
        raise ValueError(f"config.json: model_type is {model_type!r}; only 'llama' is supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act is {activation!r}; only 'silu' is supported")
    for bias in _REFUSED_BIASES:
        if config.get(bias):
            raise ValueError(f"config.json: {bias} is true; biases are not supported")
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ValueError(f"config.json: {field} is {kind!r}; only plain rotary is supported")
