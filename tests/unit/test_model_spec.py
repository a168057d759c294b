"""A decoder's description: config.json in and out, and refusals."""

import pytest

from tiny import tiny_model, tiny_spec
from twofold.model.spec import ModelSpec

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


def test_hf_config_round_trip():
    spec = tiny_spec(tied_embeddings=True, rope_theta=5e5)
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec


def test_known_model_has_its_known_size():
    spec = ModelSpec.from_hf_config(SMOLLM2_135M)
    assert (spec.head_size, spec.rope_theta) == (64, 1e5)
    assert spec.n_parameters == 134_515_008
    assert spec.kv_bytes_per_token(2) == 30 * 2 * 3 * 64 * 2


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_the_models(tied):
    model = tiny_model(tied_embeddings=tied)
    assert model.spec.n_parameters == sum(p.numel() for p in model.parameters())


def test_theta_of_transformers_5_and_4():
    old = SMOLLM2_135M | {"rope_theta": 7.0}
    new = SMOLLM2_135M | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert ModelSpec.from_hf_config(old).rope_theta == 7.0
    assert ModelSpec.from_hf_config(new).rope_theta == 7.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'llama3'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_computed_is_refused(change, named):
    with pytest.raises(ValueError, match=named) as error:
        ModelSpec.from_hf_config(SMOLLM2_135M | change)
    assert "\n" not in str(error.value)
