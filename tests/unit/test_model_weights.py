"""Hugging Face folders in and out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import BOS, EOS, IM_START, tiny_folder, tiny_model
from twofold.model import weights
from twofold.model.attention import Rows

IDS = torch.tensor([5, 17, 250, 3, 99])


def forward(model):
    with torch.no_grad():
        return model(IDS, Rows.whole([len(IDS)])) @ model.head_weight.T


@pytest.mark.parametrize("tied", [False, True])
def test_load_gives_back_what_was_written(tmp_path, tied):
    folder = tiny_folder(tmp_path, seed=3, tied_embeddings=tied)
    model = weights.load_model(folder, torch.float32)
    for name, parameter in tiny_model(3, tied_embeddings=tied).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_folder_loads_in_transformers_with_equal_logits(tmp_path, tied, dtype):
    from transformers import AutoModelForCausalLM

    source = tiny_folder(tmp_path / "source", seed=1, tied_embeddings=tied)
    model = weights.load_model(source, dtype)
    with torch.no_grad():
        model.layers[1].down.add_(0.5)
    weights.save_model(model, tmp_path / "saved", source)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert reference.dtype == dtype
    with torch.no_grad():
        expected = reference(IDS[None]).logits[0]
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(forward(model), expected, **tolerance)
    again = weights.load_model(tmp_path / "saved", dtype)
    assert torch.equal(forward(again), forward(model))


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


def test_reads_shards(tmp_path):
    folder = tiny_folder(tmp_path, seed=5)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    places = {name: shard for shard, members in shards.items() for name in members}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(forward(weights.load_model(folder, torch.float32)), forward(tiny_model(5)))


def test_stop_ids_are_the_union(tmp_path):
    folder = tiny_folder(tmp_path)
    assert weights.stop_ids(folder) == (EOS,)
    weights.write_json(folder / "generation_config.json", {"eos_token_id": [BOS, 77]})
    assert weights.stop_ids(folder) == (BOS, EOS, 77)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: rewrite(f, lambda t: t.pop("model.norm.weight")), "lack model.norm.weight"),
        (lambda f: rewrite(f, lambda t: t.update(odd=IDS)), "tensor odd has no place"),
        (
            lambda f: rewrite(f, lambda t: t.update({"lm_head.weight": torch.ones(2, 2)})),
            r"lm_head.weight has shape \[2, 2\]",
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
