"""A model's arithmetic: what its weights weigh and what a token costs to compute.

Owns: these numbers, from a TOML table or from a decoder's spec, and the formulas that need nothing
but them. Does not own: machines and seconds (`cluster`), the decoder itself (`model.spec`).

Floating-point operations count a multiplication and an addition as two. A matmul with n parameters
costs 2 n of them a token forward and 4 n backward (Kaplan et al. 2020, section 2.1); attention to
one token of context costs 4 x layers x attention width forward (scores, then values).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from twofold.model.spec import ModelSpec

OPTIMIZER_BYTES = 12  # a parameter: fp32 master weight and AdamW's two moments
GRADIENT_BYTES = 4  # a parameter: gradients accumulate in fp32


@dataclass(frozen=True)
class Shape:
    """A decoder, dense (`experts` = 1) or a mixture of experts. ValueError for what cannot be.

    `attention_width` is heads x head size of queries (where keys and values have other sizes, their
    mean); `kv_bytes_per_token` is what one token occupies in all layers' caches.
    """

    name: str
    total_parameters: float
    active_parameters: float  # that one token uses
    layers: int
    width: int
    kv_bytes_per_token: float
    attention_width: int
    experts: int = 1  # a layer
    experts_per_token: int = 1
    weight_bytes_per_parameter: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (math.isfinite(value) and value > 0):
                raise ValueError(f"model.{field.name} = {value}: it must be finite and above 0")
        if self.active_parameters > self.total_parameters:
            raise ValueError(
                f"model.active_parameters = {self.active_parameters:g}: it can be "
                f"total_parameters ({self.total_parameters:g}) at most"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model.experts_per_token = {self.experts_per_token}: it can be experts "
                f"({self.experts}) at most"
            )
        if (
            self.experts_per_token == self.experts
            and self.active_parameters < self.total_parameters
        ):
            raise ValueError(
                f"model.active_parameters = {self.active_parameters:g} is less than "
                "total_parameters: give experts and experts_per_token too"
            )

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "model") -> Shape:
        """From a parsed TOML table. ValueError, one line, for unknown, missing or wrong fields."""
        return cls(**checked(table, fields(cls), where))

    @classmethod
    def of_spec(cls, spec: ModelSpec, name: str, weight_bytes_per_parameter: float = 2.0) -> Shape:
        """Of a dense decoder as this package trains it."""
        return cls(
            name=name,
            total_parameters=spec.n_parameters,
            active_parameters=spec.n_parameters,
            layers=spec.n_layers,
            width=spec.width,
            kv_bytes_per_token=spec.kv_bytes_per_token(2),
            attention_width=spec.n_heads * spec.head_size,
            weight_bytes_per_parameter=weight_bytes_per_parameter,
        )

    @property
    def expert_parameters(self) -> float:
        """In all experts: with k of N experts a token active = shared + k / N x experts, and
        total = shared + experts."""
        if self.experts == self.experts_per_token:
            return 0.0
        idle = self.total_parameters - self.active_parameters
        return min(self.total_parameters, idle / (1 - self.experts_per_token / self.experts))

    @property
    def weight_bytes(self) -> float:
        return self.total_parameters * self.weight_bytes_per_parameter

    @property
    def optimizer_bytes(self) -> float:
        return self.total_parameters * OPTIMIZER_BYTES

    @property
    def gradient_bytes(self) -> float:
        return self.total_parameters * GRADIENT_BYTES

    def forward_flops(self, context_tokens: float) -> float:
        """Of one token that attends to `context_tokens` tokens."""
        attention = 4 * self.layers * self.attention_width * context_tokens
        return 2 * self.active_parameters + attention

    def training_flops(self, context_tokens: float, recomputed: float = 0.0) -> float:
        """Of one token, forward and backward; a share `recomputed` of the forward is done twice."""
        return (3 + recomputed) * self.forward_flops(context_tokens)

    def bytes_read(self, n_tokens: float) -> float:
        """Of weights, in a decode step of `n_tokens` sequences: all that is shared, and the experts
        that at least one token chose, if each chooses evenly: N (1 - (1 - k/N)^n)."""
        share = 1 - math.pow(1 - self.experts_per_token / self.experts, n_tokens)
        parameters = self.total_parameters - self.expert_parameters * (1 - share)
        return parameters * self.weight_bytes_per_parameter


def checked(table: Mapping[str, Any], known: Iterable[Field[Any]], where: str) -> dict[str, Any]:
    """The fields of a TOML table for a dataclass with the fields `known`, numbers as their types
    want them. ValueError, one line, naming the field: unknown (with the nearest name), missing, or
    of another type."""
    types = {field.name: (str(field.type), field) for field in known}
    for name in table:
        if name not in types:
            raise ValueError(f"{where}.{name} is unknown{nearest(name, types)}")
    values: dict[str, Any] = {}
    for name, (kind, field) in types.items():
        if name not in table:
            if field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{where}.{name} is missing: give it, it has no default")
            continue
        values[name] = _typed(table[name], kind, f"{where}.{name}")
    return values


def nearest(name: str, names: Iterable[str]) -> str:
    """ "; did you mean ...?" or the names that there are."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(names)}"


def _typed(value: Any, kind: str, where: str) -> Any:
    if kind == "float" and type(value) in (int, float):
        return float(value)
    if kind == "int" and type(value) is float and value.is_integer():
        return int(value)
    wanted = {"int": int, "str": str, "bool": bool}.get(kind)
    if wanted is not None and type(value) is wanted:
        return value
    words = {"int": "a whole number", "str": "a text", "bool": "true or false"}
    raise ValueError(f"{where} = {value!r}: {words.get(kind, 'a number')} is needed")
