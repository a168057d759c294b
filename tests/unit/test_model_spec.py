"""A decoder's description: config.json in and out, and refusals."""

import pytest

from tiny import FAMILIES, tiny_model, tiny_spec
from twofold.model.spec import ModelSpec, RopeScaling

SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_scaling": None,
}


LLAMA_3_2_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
}
QWEN3_0_6B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0)])
def test_hf_config_round_trip(family, scaling):
    spec = tiny_spec(rope_theta=5e5, **FAMILIES[family] | {"rope_scaling": scaling})
    config = spec.to_hf_config()
    assert ModelSpec.from_hf_config(config) == spec
    for written_by_other_versions in ("rope_scaling", "rope_parameters"):
        other = {key: x for key, x in config.items() if key != written_by_other_versions}
        assert ModelSpec.from_hf_config(other) == spec


@pytest.mark.parametrize(
    ("config", "head_size", "n_parameters"),
    [
        (SMOLLM2_135M, 64, 134_515_008),
        (LLAMA_3_2_1B, 64, 1_235_814_400),
        (QWEN2_5_0_5B, 64, 494_032_768),
        (QWEN3_0_6B, 128, 596_049_920),
    ],
)
def test_known_models_have_their_known_sizes(config, head_size, n_parameters):
    spec = ModelSpec.from_hf_config(config)
    assert (spec.head_size, spec.rope_theta) == (head_size, config["rope_theta"])
    assert spec.n_parameters == n_parameters
    kv_heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    assert spec.kv_bytes_per_token(2) == layers * 2 * kv_heads * head_size * 2


def test_what_may_be_left_out_is():
    left_out = ("num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    spec = ModelSpec.from_hf_config({k: x for k, x in SMOLLM2_135M.items() if k not in left_out})
    assert (spec.n_kv_heads, spec.rope_theta, spec.norm_eps, spec.context_tokens) == (
        9,
        10_000.0,
        1e-6,
        2048,
    )
    null = {"num_key_value_heads": None, "head_dim": None, "rope_theta": None}
    spec = ModelSpec.from_hf_config(SMOLLM2_135M | null)
    assert (spec.n_kv_heads, spec.head_size, spec.rope_theta) == (9, 64, 10_000.0)


def test_rope_scaling_of_llama_3():
    scaling = ModelSpec.from_hf_config(LLAMA_3_2_1B).rope_scaling
    assert scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_the_models(family, tied):
    model = tiny_model(**FAMILIES[family] | {"tied_embeddings": tied})
    assert model.spec.n_parameters == sum(p.numel() for p in model.parameters())


def test_theta_of_transformers_5_and_4():
    old = SMOLLM2_135M | {"rope_theta": 7.0}
    new = SMOLLM2_135M | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert ModelSpec.from_hf_config(old).rope_theta == 7.0
    assert ModelSpec.from_hf_config(new).rope_theta == 7.0


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (SMOLLM2_135M, {"model_type": "gpt2"}, "'gpt2'; supported: llama, qwen2, qwen3"),
        (QWEN3_0_6B, {"model_type": "qwen3_moe"}, "'qwen3_moe'"),
        (SMOLLM2_135M, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (QWEN3_0_6B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        (SMOLLM2_135M, {"rope_parameters": {"rope_type": "llama3"}}, "factor is None"),
        (SMOLLM2_135M, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
        (SMOLLM2_135M, {"attention_bias": True}, "attention_bias"),
        (QWEN3_0_6B, {"attention_bias": True}, "attention_bias"),
        (QWEN2_5_0_5B, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3_0_6B, {"use_sliding_window": True}, "use_sliding_window"),
        (SMOLLM2_135M, {"hidden_act": "gelu"}, "'gelu'"),
        (SMOLLM2_135M, {"hidden_size": None}, "hidden_size"),
        (QWEN3_0_6B, {"head_dim": None}, "head_dim"),
        (SMOLLM2_135M, {"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        (SMOLLM2_135M, {"vocab_size": -1}, "vocab_size is -1, a whole number above 0"),
        (SMOLLM2_135M, {"vocab_size": 0}, "vocab_size is 0"),
        (SMOLLM2_135M, {"vocab_size": True}, "vocab_size is True"),
        (SMOLLM2_135M, {"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        (SMOLLM2_135M, {"num_attention_heads": 0}, "num_attention_heads is 0"),
        (SMOLLM2_135M, {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        (
            SMOLLM2_135M,
            {"num_key_value_heads": 2},
            r"is 9, a multiple of num_key_value_heads \(2\)",
        ),
        (SMOLLM2_135M, {"num_key_value_heads": 18}, r"is 9, a multiple of num_key_value_heads \("),
        (SMOLLM2_135M, {"max_position_embeddings": None}, "max_position_embeddings is None"),
        (SMOLLM2_135M, {"intermediate_size": 1.5}, "intermediate_size is 1.5"),
        (SMOLLM2_135M, {"head_dim": 63}, "heads of size 63 .* an even number"),
        (SMOLLM2_135M, {"hidden_size": 9 * 63}, "heads of size 63 .* an even number"),
        (SMOLLM2_135M, {"hidden_size": 577}, r"hidden_size is 577, a multiple of .* \(9\)"),
        (SMOLLM2_135M, {"rope_theta": "1e4"}, "rope_theta is '1e4', a number above 0"),
        (SMOLLM2_135M, {"rope_theta": 0}, "rope_theta is 0"),
        (SMOLLM2_135M, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (SMOLLM2_135M, {"rope_scaling": [8.0]}, r"rope_scaling is \[8.0\]"),
        (LLAMA_3_2_1B, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    ],
)
def test_what_is_not_computed_is_refused(config, change, named):
    with pytest.raises(ValueError, match=named) as error:
        ModelSpec.from_hf_config(config | change)
    assert "\n" not in str(error.value)
