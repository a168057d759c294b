"""Hugging Face folders in and out."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import BOS, EOS, FAMILIES, IM_START, tiny_folder, tiny_model
from twofold.model import weights
from twofold.model.attention import Rows

NORM = "model.norm.weight"
IDS = torch.tensor([5, 17, 250, 3, 99])


def forward(model):
    with torch.no_grad():
        return model(IDS, Rows.whole([len(IDS)])) @ model.head_weight.T


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_load_gives_back_what_was_written(tmp_path, family, tied):
    changes = FAMILIES[family] | {"tied_embeddings": tied}
    folder = tiny_folder(tmp_path, seed=3, **changes)
    model = weights.load_model(folder, torch.float32)
    assert model.spec == tiny_model(3, **changes).spec
    for name, parameter in tiny_model(3, **changes).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_folder_loads_in_transformers_with_equal_logits(tmp_path, family, dtype, tied):
    """As one file, and again as shards in its place."""
    from transformers import AutoModelForCausalLM

    changes = FAMILIES[family] | {"tied_embeddings": tied}
    source = tiny_folder(tmp_path / "source", seed=1, **changes)
    model, saved = weights.load_model(source, dtype), tmp_path / "saved"
    with torch.no_grad():
        model.layers[1].down.add_(0.5)
    weights.save_model(model, saved, source)
    for shard_bytes in (0, 10_000):
        if shard_bytes:
            weights.write_weights(model, saved, shard_bytes)
        assert (saved / "model.safetensors").exists() == (not shard_bytes)
        reference, loading = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(loading.values())
        assert type(reference).__name__.lower() == f"{model.spec.family}forcausallm"
        assert reference.dtype == dtype
        with torch.no_grad():
            expected = reference(IDS[None]).logits[0]
        if dtype == torch.float32:
            torch.testing.assert_close(forward(model), expected)
        else:  # both round, at different places: ours may be no further from the exact logits
            with torch.no_grad():
                exact = reference.float()(IDS[None]).logits[0]
            ours, theirs = (forward(model) - exact).abs(), (expected - exact).abs()
            assert ours.mean() <= 1.5 * theirs.mean() and ours.max() <= 3 * theirs.max()
        assert torch.equal(forward(weights.load_model(saved, dtype)), forward(model))


def test_saved_folder_keeps_tokenizer_and_config(tmp_path):
    source = tiny_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config |= {"torch_dtype": config.pop("dtype"), "note": "kept"}
    (source / "config.json").write_text(json.dumps(config))
    weights.save_model(weights.load_model(source, torch.bfloat16), tmp_path / "saved", source)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["dtype"], saved["note"], "torch_dtype" in saved) == ("bfloat16", "kept", False)
    text = "What is 12 + 3?\n  ünï"
    chat = [{"role": "user", "content": text}]
    tokenizers = [weights.load_tokenizer(folder) for folder in (source, tmp_path / "saved")]
    ids = [t.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for t in tokenizers]
    assert ids[0] == ids[1]
    assert (ids[0][0], ids[0].count(EOS)) == (IM_START, 1)
    assert tokenizers[1].decode(tokenizers[1](text)["input_ids"]) == text


def test_a_saved_config_has_what_the_source_lacks(tmp_path):
    """A config of the time before transformers 5, without architectures and with defaults left
    out; and no config at all."""
    source = tiny_folder(tmp_path / "source", **FAMILIES["llama3"])
    config = json.loads((source / "config.json").read_text())
    for name in ("architectures", "rope_parameters", "head_dim"):
        del config[name]
    weights.write_json(source / "config.json", config)
    model = weights.load_model(source, torch.float32)
    weights.save_model(model, tmp_path / "saved", source)
    (source / "config.json").unlink()
    weights.save_model(model, tmp_path / "bare", source)
    for folder in ("saved", "bare"):
        saved = json.loads((tmp_path / folder / "config.json").read_text())
        assert saved["architectures"] == ["LlamaForCausalLM"]
        assert saved["rope_parameters"]["factor"] == saved["rope_scaling"]["factor"] == 8.0
        assert weights.read_spec(tmp_path / folder) == model.spec


def test_shards_hold_every_tensor_once_within_their_size(tmp_path):
    model = tiny_model(5)
    weights.write_weights(model, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / weights.INDEX_FILE).read_text())
    shards = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    n = len(shards)
    assert n > 3 and set(shards) == {f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)}
    sizes = [sum(t.nbytes for t in shards[name].values()) for name in sorted(shards)]
    for size, name in zip(sizes, sorted(shards), strict=True):
        assert size <= 20_000 or len(shards[name]) == 1  # a tensor is never cut
    assert all(size + after > 20_000 for size, after in pairwise(sizes))  # none begun too early
    places = {name: shard for shard, tensors in shards.items() for name in tensors}
    assert places == index["weight_map"] and places.keys() == weights.hf_views(model).keys()
    assert sum(len(tensors) for tensors in shards.values()) == len(places)
    assert index["metadata"]["total_size"] == 4 * model.spec.n_parameters


def test_a_save_replaces_what_was_there(tmp_path):
    """Also when its files have other names: loaders would prefer or add what is left."""
    weights.write_weights(tiny_model(5), tmp_path)
    for shard_bytes in (20_000, 40_000, 10**9):
        weights.write_weights(tiny_model(6), tmp_path, shard_bytes)
        named = {"model.safetensors"}
        if shard_bytes < 10**9:
            index = json.loads((tmp_path / weights.INDEX_FILE).read_text())
            named = {weights.INDEX_FILE, *index["weight_map"].values()}
        assert {path.name for path in tmp_path.iterdir()} == named


def test_saving_copies_no_weights(tmp_path, monkeypatch):
    """What is handed to the writer lies in the model's own memory (on a CPU)."""
    model = tiny_model(5, **FAMILIES["qwen2"])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    written = []

    def recorded(tensors, *args, **options):
        written.extend(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        save_file(tensors, *args, **options)

    monkeypatch.setattr(weights, "save_file", recorded)
    weights.write_weights(model, tmp_path)
    assert len(written) == len(weights.hf_views(model)) and set(written) == own


def test_stop_ids_are_the_union(tmp_path):
    folder = tiny_folder(tmp_path)
    assert weights.stop_ids(folder) == (EOS,)
    weights.write_json(folder / "generation_config.json", {"eos_token_id": [BOS, 77]})
    assert weights.stop_ids(folder) == (BOS, EOS, 77)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder, name, n_bytes):
    (folder / name).write_bytes((folder / name).read_bytes()[:n_bytes])


def indexed(folder, index):
    weights.write_weights(tiny_model(), folder, 20_000)
    (folder / weights.INDEX_FILE).write_text(json.dumps(index))


def configured(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    weights.write_json(folder / "config.json", config | changes)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: rewrite(f, lambda t: t.pop("model.norm.weight")), "lack model.norm.weight"),
        (lambda f: rewrite(f, lambda t: t.update(odd=IDS)), "tensor odd has no place in a llama"),
        (
            lambda f: weights.write_weights(tiny_model(0, **FAMILIES["qwen2"]), f),
            r"[qkv]_proj.bias has no place in a llama",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({"lm_head.weight": torch.ones(2, 2)})),
            r"lm_head.weight has shape \[2, 2\]",
        ),
        (lambda f: cut(f, "model.safetensors", 0), "model.safetensors: not a complete safetensors"),
        (lambda f: cut(f, "model.safetensors", 40), "model.safetensors: not a complete"),
        (lambda f: cut(f, "model.safetensors", -4), "model.safetensors: not a complete"),
        (lambda f: indexed(f, {}), "index.json: weight_map must be an object"),
        (lambda f: indexed(f, []), "index.json: a JSON object is needed, not list"),
        (
            lambda f: indexed(f, {"weight_map": ["model.safetensors"]}),
            "index.json: weight_map must",
        ),
        (
            lambda f: indexed(f, {"weight_map": {"lm_head.weight": 1}}),
            "index.json: weight_map must",
        ),
        (
            lambda f: indexed(f, {"weight_map": {"lm_head.weight": "a.safetensors"}}),
            "a.safetensors is missing .named by model.safetensors.index.json",
        ),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: a JSON object is needed"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json: model_type is None"),
        (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json: not valid JSON"),
        (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json: not UTF-8"),
        (lambda f: configured(f, vocab_size=-1), "config.json: vocab_size is -1"),
        (lambda f: configured(f, quantization_config={}), "config.json: quantised weights"),
        (
            lambda f: rewrite(f, lambda t: t.update({NORM: t[NORM].to(torch.int8)})),
            "model.norm.weight holds I8, and quantised",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
            "model.norm.weight holds F8_E4M3, .* take a float16, bfloat16",
        ),
    ],
)
def test_incomplete_folders_are_refused_by_name(tmp_path, damage, named):
    folder = tiny_folder(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=named) as error:
        weights.load_model(folder, torch.float32)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    (tiny_folder(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer"):
        weights.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "none"}}'),
        ("tokenizer_config.json", "[1]"),
    ],
)
def test_a_broken_tokenizer_is_refused_in_one_line(tmp_path, name, content):
    (tiny_folder(tmp_path) / name).write_text(content)
    with pytest.raises(ValueError, match=r"the tokenizer's files cannot be read .* fetch") as error:
        weights.load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    folder = tiny_folder(tmp_path)
    tokenizer, spec = weights.load_tokenizer(folder), weights.read_spec(folder)
    weights.check_tokenizer(tokenizer, spec, folder)  # fewer tokens than rows are usual
    while len(tokenizer) < spec.vocab_size:
        tokenizer.add_tokens([f"<{len(tokenizer)}>"])
    weights.check_tokenizer(tokenizer, spec, folder)
    tokenizer.add_tokens(["<more>"])
    named = f"token '<more>' has id {spec.vocab_size}, but config.json's vocab_size is"
    with pytest.raises(ValueError, match=named) as error:
        weights.check_tokenizer(tokenizer, spec, folder)
    assert str(tmp_path) in str(error.value)


def test_stop_ids_that_are_none_are_refused(tmp_path):
    folder = tiny_folder(tmp_path)
    weights.write_json(folder / "generation_config.json", {"eos_token_id": "<|im_end|>"})
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id is '<\|im_end\|>'"):
        weights.stop_ids(folder)
