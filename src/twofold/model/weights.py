"""Hugging Face folders: model weights and tokenizer in and out.

Owns: the mapping between Hugging Face tensor names and our (fused) parameters, reading and writing
of the folder, the stop ids. Does not own: where a folder comes from (`resolve`), GGUF (`gguf`).
transformers is imported only to load a tokenizer: its import takes seconds.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from twofold.model.spec import ModelSpec
from twofold.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000  # Hugging Face's usual size; loaders read shard by shard
# as safetensors names them; whole numbers and fp8 mean nothing without their scales
WEIGHT_DTYPES = ("F16", "BF16", "F32", "F64")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
COPIED_FILES = (
    *VOCABULARY_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def hf_views(model: Transformer) -> dict[str, Tensor]:
    """Every parameter under its Hugging Face name, as views: fused projections are split by rows,
    so that reading is `view.copy_(file)` and writing is the views themselves."""
    spec = model.spec
    heads, kv = spec.n_heads * spec.head_size, spec.n_kv_heads * spec.head_size
    views = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    if model.head is not None:
        views["lm_head.weight"] = model.head
    for index, layer in enumerate(model.layers):
        q, k, v = layer.qkv.split((heads, kv, kv))
        gate, up = layer.gate_up.split((spec.ff_width, spec.ff_width))
        parts = {
            "input_layernorm.weight": layer.attention_norm,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": layer.out,
            "post_attention_layernorm.weight": layer.ff_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
        }
        if spec.qkv_bias:
            biases = layer.qkv_bias.split((heads, kv, kv))
            parts |= {f"self_attn.{x}_proj.bias": b for x, b in zip("qkv", biases, strict=True)}
        if spec.qk_norm:
            parts |= {
                "self_attn.q_norm.weight": layer.q_norm,
                "self_attn.k_norm.weight": layer.k_norm,
            }
        views |= {f"model.layers.{index}.{name}": part for name, part in parts.items()}
    return {name: view.detach() for name, view in views.items()}


def read_spec(folder: Path) -> ModelSpec:
    """The folder's decoder. ValueError if config.json is missing or not supported."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: config.json is missing; a Hugging Face model folder is needed")
    config = _read_json(folder / "config.json")
    if config.get("quantization_config") is not None:
        raise ValueError(f"{folder}/config.json: quantised weights are not supported")
    try:
        return ModelSpec.from_hf_config(config)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}") from None


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Transformer:
    """Reads config.json and the safetensors file (or shards) of a Hugging Face folder.

    Weights are converted to `dtype` as they are copied. ValueError, naming folder and file, if a
    file cannot be read, or a tensor is missing, has another shape or no floating-point numbers, or
    is one this decoder would ignore.
    """
    spec = read_spec(folder)
    files = _weight_files(folder)
    model = Transformer(spec, dtype, device)
    missing = hf_views(model)
    for path in files:
        try:
            _read_weights(path, missing, spec)
        except SafetensorError as error:
            raise ValueError(
                f"{path}: not a complete safetensors file ({first_line(error)}); fetch it again"
            ) from None
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder}: the weights lack {next(iter(missing))}{more}")
    return model


def save_model(model: Transformer, folder: Path, source_folder: Path) -> None:
    """Writes a folder that `transformers` and vLLM load: weights in the model's dtype, and the
    tokenizer files and config.json of `source_folder`, with that dtype and with whatever its
    family's config.json needs and that one lacks. config.json is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(model, folder)
    for name in COPIED_FILES:
        if (source_folder / name).is_file():
            shutil.copyfile(source_folder / name, folder / name)
    described = model.spec.to_hf_config()
    config = described | _read_json(source_folder / "config.json")
    config["architectures"] = described["architectures"]
    config.pop("torch_dtype", None)  # the name of "dtype" before transformers 5
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)


def write_weights(model: Transformer, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes the weights under Hugging Face names, replacing what weights `folder` has:
    model.safetensors, or, beyond `max_shard_bytes`, shards of at most that size (a tensor is never
    cut) and their index. On a CPU nothing is copied; from another device, one shard at a time."""
    shards = _shards(hf_views(model), max_shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    for name, shard in zip(names, shards, strict=True):
        tensors = {key: view.cpu().contiguous() for key, view in shard.items()}
        write_tensors(tensors, folder / f"{name}.partial")
    for name in names:
        os.replace(folder / f"{name}.partial", folder / name)
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(view.nbytes for shard in shards for view in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / INDEX_FILE, index)
        names.append(INDEX_FILE)
    for path in folder.glob("model*.safetensors*"):  # an older save's, under other names
        if path.name not in names:
            path.unlink()


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file. OSError when it cannot be written (disk full)."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's own, whatever happened
        raise OSError(f"cannot write {path}: {error}") from error


def _shards(views: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """The views in their order, a new shard begun where the last one would grow too large."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, view in views.items():
        if shards[-1] and size + view.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = view
        size += view.nbytes
    return shards


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer with its chat template. ValueError if it is missing or broken."""
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise ValueError(f"{folder}: no tokenizer ({', '.join(VOCABULARY_FILES)} are all missing)")
    from transformers import AutoTokenizer  # slow import, needed nowhere else

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its readers raise whatever they stumble over, even plain Exception
        raise ValueError(
            f"{folder}: the tokenizer's files cannot be read ({first_line(error)}); fetch "
            "tokenizer.json and tokenizer_config.json again"
        ) from None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, folder: Path) -> None:
    """ValueError if the tokenizer writes token ids for which the model has no embedding."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= spec.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer's token {token!r} has id {highest}, but config.json's "
            f"vocab_size is {spec.vocab_size}; take the model's own tokenizer"
        )


def stop_ids(folder: Path) -> tuple[int, ...]:
    """Token ids that end a completion, ascending: the end-of-sequence ids of
    generation_config.json, config.json and the tokenizer together (chat models often differ)."""
    found = {"tokenizer.json": load_tokenizer(folder).eos_token_id}
    for name in ("generation_config.json", "config.json"):
        found[name] = _read_json(folder / name).get("eos_token_id")
    ids: set[int] = set()
    for name, eos in found.items():
        if eos is None:
            continue
        listed = eos if isinstance(eos, list) else [eos]
        if not all(type(token_id) is int for token_id in listed):
            raise ValueError(
                f"{folder / name}: eos_token_id is {eos!r}, a token id or a list of them is needed"
            )
        ids.update(listed)
    return tuple(sorted(ids))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes indented JSON; a reader finds the old file or the new one, never half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _read_json(path: Path) -> dict[str, Any]:
    """The parsed file, {} if there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}); fetch it again") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{path}: a JSON object is needed, not {kind}; fetch it again")
    return content


def _weight_files(folder: Path) -> list[Path]:
    names, named_by = [WEIGHTS_FILE], ""
    if (folder / INDEX_FILE).is_file():
        places = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
            raise ValueError(
                f"{folder / INDEX_FILE}: weight_map must be an object of tensor names and file "
                "names; fetch it again"
            )
        names, named_by = sorted(set(places.values())), f" (named by {INDEX_FILE})"
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder}: {name} is missing{named_by}; weights are read from safetensors only"
            )
    return [folder / name for name in names]


def _read_weights(path: Path, missing: dict[str, Tensor], spec: ModelSpec) -> None:
    """Copies the file's tensors into their places, and takes those out of `missing`."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            target = missing.pop(name, None)
            if target is not None:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in WEIGHT_DTYPES:
                    raise ValueError(
                        f"{path}: {name} holds {dtype}, and quantised weights are not supported; "
                        "take a float16, bfloat16, float32 or float64 version of the model"
                    )
                _copy_checked(target, file.get_tensor(name), f"{path}: {name}")
            elif not _ignorable(name, spec):
                raise ValueError(f"{path}: tensor {name} has no place in a {spec.family} decoder")


def _copy_checked(target: Tensor, source: Tensor, what: str) -> None:
    if source.shape != target.shape:
        shapes = f"{list(source.shape)}, config.json asks for {list(target.shape)}"
        raise ValueError(f"{what} has shape {shapes}")
    target.copy_(source)


def first_line(error: Exception) -> str:
    """What another library's exception says, in one line: its type and how its message begins."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _ignorable(name: str, spec: ModelSpec) -> bool:
    """Tensors that repeat what the decoder has: a tied head, tabulated rotary frequencies."""
    tied_head = spec.tied_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")
