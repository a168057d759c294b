"""The byte ledger: its formulae against what torch holds, what is refused, what is measured."""

from __future__ import annotations

import mmap
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.rewards import even_sum
from tests.e2e.small import folder, small_config
from tests.tiny import FAMILIES, tiny_folder, tiny_model, tiny_spec

from twofold.config import Config, ModelConfig
from twofold.memory import ledger as ledger_module
from twofold.memory import meter
from twofold.memory.activations import saved_bytes_per_row
from twofold.memory.fit import require_fit
from twofold.memory.ledger import GB, Ledger, Owner, forecast
from twofold.model import cpu_kernels
from twofold.model.attention import Rows
from twofold.model.kv_cache import KVCache
from twofold.model.spec import ModelSpec
from twofold.obs.record import Record
from twofold.runtime import run
from twofold.runtime.memory import forecaster
from twofold.step import lanes, logprob
from twofold.step.optimizer import Optimizer
from twofold.tasks.load import Task
from twofold.types import Phase, Prompt

__all__ = ["folder"]

DTYPES = {torch.float32: 4, torch.bfloat16: 2}
BIG = ModelSpec(
    vocab_size=49_152, width=576, n_layers=30, n_heads=9, n_kv_heads=3, head_size=64, ff_width=1536,
    rope_theta=1e5, norm_eps=1e-5, tied_embeddings=True, context_tokens=8192,
)  # fmt: skip


def saved_bytes(model: torch.nn.Module, lengths: list[int]) -> int:
    """What autograd keeps of one forward pass, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(torch.arange(sum(lengths)) % 250, Rows.whole(lengths))
    del hidden
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_saved_activations_are_those_that_autograd_keeps(
    family: str, dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels and cpu_kernels.why_not_used():
        pytest.skip(cpu_kernels.why_not_used())
    monkeypatch.setattr(cpu_kernels, "forced_eager", not kernels)
    n_rows, keys = 128, 64

    def found(n_layers: int) -> int:
        model = tiny_model(0, dtype, n_layers=n_layers, **FAMILIES[family])
        return saved_bytes(model, [keys] * (n_rows // keys))

    def expected(n_layers: int) -> int:
        spec = tiny_spec(n_layers=n_layers, **FAMILIES[family])
        row = saved_bytes_per_row(spec, DTYPES[dtype], kernels, keys)
        # the attention weights: which of torch's attentions keep them depends on the device
        return n_rows * (row - (0 if kernels else n_layers * spec.n_heads * keys * 4))

    per_layer = (found(5) - found(2)) / 3
    assert (expected(5) - expected(2)) / 3 == pytest.approx(per_layer, rel=2e-3)
    rest = found(2) - 2 * per_layer
    assert rest <= expected(2) - 2 * per_layer < 2 * rest  # of one row, whatever the layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_optimizer_and_cache_are_those_that_are_allocated(
    family: str, dtype: torch.dtype
) -> None:
    model = tiny_model(0, dtype, **FAMILIES[family])
    config = bf16()
    config.model.dtype = str(dtype).removeprefix("torch.")
    optimizer = Optimizer(dict(model.named_parameters()), config.train)
    optimizer.zero_gradients()
    state = optimizer.state_tensors()
    weights = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    masters = [
        m for m in optimizer.masters.values() if m.untyped_storage().data_ptr() not in weights
    ]
    owners = forecast(model.spec, config, 20, "cuda").by_owner(Phase.TRAIN)
    assert owners[Owner.POLICY] == nbytes(weights.values())
    moments = [tensor for name, tensor in state.items() if name.startswith("exp_avg")]
    assert owners[Owner.OPTIMIZER] == nbytes([*moments, *masters])
    gradients = [m.grad for m in optimizer.masters.values() if m.grad is not None]
    assert owners[Owner.GRADIENTS] == nbytes(gradients)

    config.rollout.max_running_samples, config.rollout.max_new_tokens = 3, 40
    cache = KVCache(model.spec, 3 * (2 + 3), 16, dtype, "cpu")
    owners = forecast(model.spec, config, 20, "cuda").by_owner(Phase.GENERATE)
    assert owners[Owner.KV] == nbytes([cache.keys, cache.values])


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_numbers_that_torch_free_code_repeats_are_still_the_same() -> None:
    assert ledger_module.PREFILL_ROWS == lanes.PREFILL_ROWS
    assert ledger_module.LOGITS_CHUNK_BYTES == logprob.CHUNK_BYTES
    assert ledger_module.ROW_MULTIPLE == logprob.ROW_MULTIPLE


def bf16(**sections: Any) -> Config:
    """The default options on a machine where auto means bfloat16."""
    return Config(model=ModelConfig(dtype="bfloat16"), **sections)


def test_what_makes_a_run_larger_makes_its_forecast_larger() -> None:
    def ledger(**changes: Any) -> Ledger:
        config = bf16()
        for name, value in changes.items():
            section, _, option = name.partition("__")
            setattr(getattr(config, section), option, value)
        return forecast(BIG, config, 43, "cpu")

    plain = ledger()
    assert plain.phases == [Phase.GENERATE, Phase.TRAIN, Phase.EVAL]
    more_rows = ledger(train__micro_batch_tokens=4096)
    assert more_rows.total(Phase.TRAIN) > plain.total(Phase.TRAIN) + 0.9 * GB
    assert more_rows.total(Phase.GENERATE) == plain.total(Phase.GENERATE)
    longer = ledger(rollout__max_new_tokens=1024)
    assert longer.by_owner(Phase.GENERATE)[Owner.KV] > 10 * plain.by_owner(Phase.GENERATE)[Owner.KV]
    assert Owner.KV not in longer.by_owner(Phase.TRAIN)
    kept = ledger(rollout__max_new_tokens=1024, rollout__kv_after_update="keep")
    assert kept.by_owner(Phase.TRAIN)[Owner.KV] == longer.by_owner(Phase.GENERATE)[Owner.KV]
    reference = ledger(train__kl_coef=0.1)
    assert Phase.SCORE in reference.phases
    assert reference.by_owner(Phase.GENERATE)[Owner.REFERENCE] == BIG.n_parameters * 2
    assert Owner.CRITIC in ledger(train__loss="ppo").by_owner(Phase.TRAIN)
    assert ledger(task__held_out=0).phases == [Phase.GENERATE, Phase.TRAIN]


def fit(config: Config, room_gb: float) -> str:
    def predict(changed: Config) -> Ledger:
        return forecast(BIG, changed, 43, "cpu")

    return require_fit(predict, config, 43, room_gb * GB)


def applied(config: Config, remedy: str) -> Config:
    """`config` with every `section.option = value` that the text names."""
    for word in remedy.replace(",", "").split(" with ")[1:]:
        for name, _, value in (part.partition(" = ") for part in _options(word)):
            section, _, option = name.partition(".")
            kind = type(getattr(getattr(config, section), option))
            setattr(getattr(config, section), option, kind(value))
    return config


def _options(text: str) -> list[str]:
    words = text.split()
    return [f"{words[i - 1]} = {words[i + 1]}" for i, w in enumerate(words) if w == "="]


def test_a_run_that_fits_gets_one_line() -> None:
    line = fit(bf16(), 23)
    assert line.startswith("memory   generate 2.") and line.endswith("(of 23.0 GB)")
    assert "\n" not in line and ", train 4." in line


def long_run() -> Config:
    config = bf16()
    config.model.dtype = "float32"
    config.rollout.max_new_tokens, config.rollout.max_running_samples = 512, 256
    config.sched.groups_per_step = 64
    return config


def test_each_remedy_that_is_offered_is_enough_and_no_larger_value_would_be() -> None:
    with pytest.raises(ValueError) as refused:
        fit(long_run(), 7)
    text = str(refused.value)
    assert "\n" not in text and text.startswith("memory cannot hold this run: generate 8.")
    offers = text.partition("it fits with ")[2].split(", or with ")
    assert [offer.partition(" = ")[0] for offer in offers] == [
        "rollout.max_running_samples",
        "rollout.kv_cache_tokens",
        "model.dtype",
    ]
    for offer in offers:
        fit(applied(long_run(), f" with {offer}"), 7)
    lanes_offered = applied(long_run(), f" with {offers[0]}")
    lanes_offered.rollout.max_running_samples += 1
    with pytest.raises(ValueError):
        fit(lanes_offered, 7)


def test_what_no_option_mends_alone_is_offered_together() -> None:
    with pytest.raises(ValueError, match="together") as refused:
        fit(long_run(), 5)
    text = str(refused.value).removesuffix(" together")
    changed = applied(long_run(), text)
    assert changed.train.micro_batch_tokens < 2048 and changed.rollout.max_running_samples < 256
    fit(changed, 5)
    with pytest.raises(ValueError, match="smaller model, or more memory"):
        fit(long_run(), 2)


def test_the_longest_prompt_is_found_among_the_data(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    prompts = [Prompt("x" * n) for n in (3, 50, 20)]
    _, longest = forecaster(bf16(), folder, Task(prompts, [], ""), torch.device("cpu"))
    assert longest == 50


def test_a_run_that_cannot_fit_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path
) -> None:
    config = small_config(folder, tmp_path / "run", run__memory_limit_gb=0.3)
    with pytest.raises(ValueError, match=r"^memory cannot hold this run: .*\(of 0\.3 GB\)"):
        run.train(config, reward=even_sum)
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_it_will_hold_and_records_what_it_held(
    folder: Path, tmp_path: Path
) -> None:
    lines: list[str] = []

    class Listening(run.Progress):
        def message(self, text: str) -> None:
            lines.append(text)

    config = small_config(folder, tmp_path / "run", train__kl_coef=0.1, train__steps=2)
    run.train(config, reward=even_sum, progress=Listening())
    [line] = [line for line in lines if line.startswith("memory")]
    assert re.fullmatch(
        r"memory   generate \d+\.\d GB, score \d+\.\d GB, train \d+\.\d GB, eval \d+\.\d GB "
        r"\(of \d+\.\d GB\)",
        line,
    )
    with Record.open(tmp_path / "run", read_only=True) as record:
        held = {row.name: row.value for row in record.metrics() if row.version == 1}
    for phase in ("generate", "score", "train"):
        assert 0.1 < held[f"memory/{phase}_gb"] < 20


# ---------------------------------------------------------------- the machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


PROC = {
    "proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  4000 kB\n",
    "proc/self/status": "VmRSS: 300 kB\nRssAnon: 100 kB\n",
}
MIB = 2**20
GROUPS = {
    "no limit": ({"proc/self/cgroup": "0::/\n"}, 4100 * 1024),
    "version 2": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": f"{2 * MIB}\n",  # of the group above
            "sys/fs/cgroup/a/memory.current": f"{MIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {MIB // 2}\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "0\n",
            "sys/fs/cgroup/a/b/memory.stat": "\n",
        },
        MIB + MIB // 2 + 100 * 1024,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{3 * MIB}\n",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{MIB}\n",
            "sys/fs/cgroup/memory/x/memory.stat": "total_inactive_file 0\n",
        },
        2 * MIB + 100 * 1024,
    ),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_room_is_what_the_system_and_the_control_groups_leave(tmp_path: Path, groups: str) -> None:
    files, expected = GROUPS[groups]
    assert meter.cpu_room_bytes(write(tmp_path, PROC | files)) == expected


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="not Linux")
def test_the_peak_of_a_phase_is_its_own() -> None:
    peaks = meter.PhaseMeter(torch.device("cpu"))
    peaks.begin(Phase.GENERATE)
    with mmap.mmap(-1, 200_000_000) as block:  # given back whatever the allocator keeps
        block.write(b"x" * len(block))
    peaks.begin(Phase.TRAIN)
    first = peaks.take()
    assert set(first) == {"memory/generate_gb", "memory/train_gb"}
    assert first["memory/generate_gb"] > first["memory/train_gb"] + 0.15
    assert set(peaks.take()) == {"memory/train_gb"}


def test_a_longer_batch_needs_no_more_than_a_full_micro_batch() -> None:
    config = bf16()
    few = replace(config.sched, groups_per_step=64)
    many = bf16(sched=replace(few, groups_per_step=128))
    a = forecast(BIG, bf16(sched=few), 43, "cuda").total(Phase.TRAIN)
    assert forecast(BIG, many, 43, "cuda").total(Phase.TRAIN) == a
