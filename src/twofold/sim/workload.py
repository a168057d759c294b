"""What a simulated run is given to do: how long completions are, what rewards say and cost.

Owns: the three kinds of work (`Workload` for schedules in tests, `Synthetic` from distributions,
`Recorded` from real runs) and the file of a `Synthetic` one. Everything about a group is a function
of the work and the group id, whatever happens around it.
Does not own: what decoding or training costs (`cost`), how records are read (`calibrate`).
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any, Protocol

import tomli_w


@dataclass(frozen=True)
class GroupWork:
    prompt_tokens: int
    lengths: tuple[int, ...]  # tokens of each completion
    n_valid: int  # samples whose reward does not fail
    reward_s: float
    varies: bool  # its rewards are not all equal
    pass_rate: float = 0.5  # share of the valid samples that pass
    trains: bool = True  # its tokens are computed in training; else the group only counts


class Work(Protocol):
    """What the simulated executor asks for."""

    @property
    def n_groups(self) -> int | None:
        """The data ends there; None: never."""
        ...

    def group(self, group_id: int) -> GroupWork: ...


@dataclass(frozen=True)
class Workload:
    """Completions have 1 to `max_tokens` tokens, most few of them, a share `long_tail` the most.

    `reward_s` is the mean of an exponential; a sample's reward fails with `invalid`, and with
    `bad_group` all rewards of a group do; with `solved` they are all equal.
    """

    seed: int
    group_size: int
    max_tokens: int = 16
    long_tail: float = 0.1
    prompt_tokens: int = 8
    reward_s: float = 0.05
    invalid: float = 0.0
    bad_group: float = 0.0
    solved: float = 0.0
    n_groups: int | None = None  # the data ends there; None: never

    def group(self, group_id: int) -> GroupWork:
        random = Random(self.seed * 1_000_003 + group_id)
        samples = range(self.group_size)
        lengths = tuple(
            self.max_tokens
            if random.random() < self.long_tail
            else 1 + int((self.max_tokens - 1) * random.random() ** 3)
            for _ in samples
        )
        bad = random.random() < self.bad_group
        n_valid = sum(random.random() >= self.invalid for _ in samples)
        reward_s = random.expovariate(1 / self.reward_s)
        varies = random.random() >= self.solved
        return GroupWork(self.prompt_tokens, lengths, 0 if bad else n_valid, reward_s, varies)


# ---------------------------------------------------------------- from distributions


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal with the standard deviation `sigma`, cut off at
    `max_tokens`. ValueError for what cannot be."""

    median_tokens: float
    sigma: float
    max_tokens: int

    def __post_init__(self) -> None:
        _at_least("lengths.sigma", self.sigma, 0.0)
        _check_median(self.median_tokens, self.max_tokens)

    def at(self, z: float) -> int:
        """The length that stands where `z` stands in a standard normal distribution."""
        # above that, exp() overflows, and the cap is far below
        exponent = min(self.sigma * z, 700.0 - math.log(self.median_tokens))
        return _tokens(self.median_tokens * math.exp(exponent), self.max_tokens)

    def draw(self, random: Random) -> int:
        return self.at(random.gauss())


@dataclass(frozen=True)
class Pareto:
    """Lengths of which a share (x / x0)^-alpha is longer than x; x0 = median / 2^(1/alpha); cut
    off at `max_tokens`: a heavy tail, heavier with smaller `alpha`. ValueError for what cannot
    be."""

    median_tokens: float
    alpha: float
    max_tokens: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"lengths.alpha = {self.alpha}: give more than 0 (2: a mild tail)")
        _check_median(self.median_tokens, self.max_tokens)

    def at(self, z: float) -> int:
        """The length that stands where `z` stands in a standard normal distribution."""
        share_longer = max(NormalDist().cdf(-z), 1e-300)
        exponent = min(math.log(0.5 / share_longer) / self.alpha, 600.0)
        return _tokens(self.median_tokens * math.exp(exponent), self.max_tokens)

    def draw(self, random: Random) -> int:
        return self.at(random.gauss())


@dataclass(frozen=True)
class Beta:
    """Pass rates of groups. ValueError unless both are above 0."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"pass_rate.{name} = {value}: give more than 0 (1 and 1: uniform)")

    def draw(self, random: Random) -> float:
        return random.betavariate(self.alpha, self.beta)


@dataclass(frozen=True)
class Synthetic:
    """Work drawn from distributions.

    `correlation` (0 to 1) is what completions of a group have in common: of the variance of a
    length, on the normal scale, this share is the group's and the rest the completion's own.
    `prompt_tokens` is a range, both ends included. A completion passes with its group's pass rate,
    drawn from a Beta or from a list of rates (each as likely); how many passed decides whether the
    group's rewards vary. `reward_s`, `invalid`, `bad_group`, `n_groups`: as in `Workload`.
    `trains_all`: also groups without variance are computed in training. ValueError for what cannot
    be.
    """

    seed: int
    group_size: int
    lengths: LogNormal | Pareto
    correlation: float = 0.0
    prompt_tokens: tuple[int, int] = (64, 64)
    pass_rate: Beta | tuple[float, ...] = (0.5,)
    reward_s: float = 0.05
    invalid: float = 0.0
    bad_group: float = 0.0
    trains_all: bool = False
    n_groups: int | None = None

    def __post_init__(self) -> None:
        _at_least("group_size", self.group_size, 1)
        for name in ("correlation", "invalid", "bad_group"):
            _share(name, getattr(self, name))
        if not (math.isfinite(self.reward_s) and self.reward_s > 0):
            raise ValueError(f"reward_s = {self.reward_s}: give seconds above 0 (0.001: at once)")
        least, most = self.prompt_tokens
        if not 1 <= least <= most:
            raise ValueError(f"prompt_tokens = {[least, most]}: give [least, most], 1 or more")
        if not isinstance(self.pass_rate, Beta):
            if not self.pass_rate:
                raise ValueError("pass_rate = []: give one rate at least, or alpha and beta")
            for rate in self.pass_rate:
                _share("pass_rate", rate)
        if self.n_groups is not None:
            _at_least("n_groups", self.n_groups, 0)

    def group(self, group_id: int) -> GroupWork:
        random = Random(self.seed * 1_000_003 + group_id)
        shared, own = math.sqrt(self.correlation), math.sqrt(1.0 - self.correlation)
        of_group = random.gauss()
        lengths = tuple(
            self.lengths.at(shared * of_group + own * random.gauss())
            for _ in range(self.group_size)
        )
        prompt_tokens = random.randint(*self.prompt_tokens)
        if isinstance(self.pass_rate, Beta):
            rate = self.pass_rate.draw(random)
        else:
            rate = random.choice(self.pass_rate)
        bad = random.random() < self.bad_group
        n_valid = sum(random.random() >= self.invalid for _ in range(self.group_size))
        n_valid = 0 if bad else n_valid
        n_passed = sum(random.random() < rate for _ in range(n_valid))
        varies = 0 < n_passed < n_valid
        return GroupWork(
            prompt_tokens,
            lengths,
            n_valid,
            reward_s=random.expovariate(1 / self.reward_s),
            varies=varies,
            pass_rate=n_passed / n_valid if n_valid else 0.0,
            trains=varies or self.trains_all,
        )


# ---------------------------------------------------------------- from records


@dataclass(frozen=True)
class Recorded:
    """The groups of real runs, in the order in which they started, stretched over `n_total` groups:
    what changed while the model learned (lengths, pass rates) changes at the same share of the
    simulated run. Lengths are cut off at `max_tokens`. ValueError for no groups, or no tokens."""

    groups: tuple[GroupWork, ...]
    n_total: int
    max_tokens: int
    n_groups: int | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups = []: a recorded workload needs one finished group at least")
        _at_least("n_total", self.n_total, 1)
        _at_least("max_tokens", self.max_tokens, 1)

    def group(self, group_id: int) -> GroupWork:
        # a run that drops groups starts more than n_total
        place = min(group_id * len(self.groups) // self.n_total, len(self.groups) - 1)
        found = self.groups[place]
        lengths = tuple(min(n, self.max_tokens) for n in found.lengths)
        return GroupWork(**{**vars(found), "lengths": lengths})


# ---------------------------------------------------------------- the file of a Synthetic


_LENGTHS: dict[str, type[LogNormal] | type[Pareto]] = {"lognormal": LogNormal, "pareto": Pareto}


def save(work: Synthetic, path: Path) -> None:
    """As TOML, which `load` reads."""
    values = {k: v for k, v in vars(work).items() if v is not None}
    kind = next(name for name, made in _LENGTHS.items() if isinstance(work.lengths, made))
    values["lengths"] = {"kind": kind, **vars(work.lengths)}
    rate = work.pass_rate
    values["pass_rate"] = dict(vars(rate)) if isinstance(rate, Beta) else list(rate)
    values["prompt_tokens"] = list(work.prompt_tokens)
    path.write_text(tomli_w.dumps(values), "utf-8")


def load(path: Path) -> Synthetic:
    """A TOML file with the fields of `Synthetic`; lengths = {kind = "lognormal" or "pareto", ...},
    pass_rate = {alpha, beta} or a list, prompt_tokens = [least, most]. ValueError, in one line that
    names the file, for anything wrong."""
    try:
        return from_dict(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; it is not a TOML file") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_dict(values: Mapping[str, Any]) -> Synthetic:
    """What a file says, as it was parsed. ValueError for unknown, missing and wrong values."""
    values = dict(values)
    lengths = values.get("lengths")
    if not isinstance(lengths, Mapping) or lengths.get("kind") not in list(_LENGTHS):
        raise ValueError(f"lengths = {lengths!r}: give a table with kind = lognormal or pareto")
    parts = {k: v for k, v in lengths.items() if k != "kind"}
    values["lengths"] = _made(_LENGTHS[lengths["kind"]], parts, "lengths.")
    rate = values.get("pass_rate")
    if isinstance(rate, Mapping):
        values["pass_rate"] = _made(Beta, rate, "pass_rate.")
    elif rate is not None:
        values["pass_rate"] = _numbers("pass_rate", rate)
    if "prompt_tokens" in values:
        both = _numbers("prompt_tokens", values["prompt_tokens"])
        if len(both) != 2 or any(not math.isfinite(n) or n != int(n) for n in both):
            raise ValueError(f"prompt_tokens = {list(both)}: give [least, most], 1 or more")
        values["prompt_tokens"] = (int(both[0]), int(both[1]))
    made = _made(Synthetic, values, "")
    assert isinstance(made, Synthetic)
    return made


_WHOLE = ("seed", "group_size", "max_tokens", "n_groups")
_BUILT = ("lengths", "pass_rate", "prompt_tokens")  # checked where they were built


def _made(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    known = {f.name for f in fields(cls)}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"there are {sorted(known)}"
            raise ValueError(f"{prefix}{name} is not known; {hint}")
        if prefix == "" and name in _BUILT:
            continue
        if name == "trains_all":
            if not isinstance(value, bool):
                raise ValueError(f"trains_all = {value!r} is not true or false")
        elif not _is_number(value) or (name in _WHOLE and not isinstance(value, int)):
            what = "a whole number" if name in _WHOLE else "a number"
            raise ValueError(f"{prefix}{name} = {value!r} is not {what}")
    for field in fields(cls):
        if field.default is MISSING and field.name not in values:
            raise ValueError(f"{prefix}{field.name} is missing: give it")
    return cls(**values)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
        raise ValueError(f"{name} = {value!r} is not a list of numbers")
    return tuple(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_median(median_tokens: float, max_tokens: int) -> None:
    _at_least("lengths.median_tokens", median_tokens, 1)
    if max_tokens < median_tokens:
        raise ValueError(
            f"lengths.max_tokens = {max_tokens} is below the median of {median_tokens}: give more"
        )


def _tokens(length: float, max_tokens: int) -> int:
    return max(1, min(round(length), max_tokens))


def _at_least(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} = {value}: give {least:g} or more")


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} = {value}: give a share from 0 to 1")
