"""The file that describes a cluster to plan for.

Owns: reading it: the tables cluster, model and search. Does not own: what is in the first two
(`cluster`, `shape`), the search (`plan`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from twofold.sim.cluster import Cluster
from twofold.sim.plan import Search
from twofold.sim.shape import Shape, nearest


class PlanFile(NamedTuple):
    """`shape` is None when the file describes no model."""

    cluster: Cluster
    shape: Shape | None
    search: Search


def load(path: Path) -> PlanFile:
    """ValueError, in one line that names the file, for anything wrong in it."""
    try:
        return from_dict(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_dict(tables: Mapping[str, Any]) -> PlanFile:
    for name, table in tables.items():
        if name not in ("cluster", "model", "search"):
            raise ValueError(f"{name} is unknown{nearest(name, ('cluster', 'model', 'search'))}")
        if not isinstance(table, Mapping):
            raise ValueError(f"{name} = {table!r}: a table is needed, [{name}]")
    if "cluster" not in tables:
        raise ValueError(
            "[cluster] is missing: describe the cards, see examples/clusters/h100_node.toml"
        )
    return PlanFile(
        Cluster.from_table(tables["cluster"]),
        Shape.from_table(tables["model"]) if "model" in tables else None,
        _search(tables.get("search", {})),
    )


_ONE = {"same_layout": bool, "n_steps": int, "seed": int}
_OF_A_LIST: dict[str, tuple[type, str]] = {
    "staleness": (int, "whole numbers"),
    "cards_per_replica": (int, "whole numbers"),
    "splits": (float, "numbers"),
    "quanta": (int, "whole numbers"),
    "group_shapes": (list, "[prompts, samples] pairs"),
    "recompute": (float, "numbers"),
    "swap_optimizer": (bool, "true or false"),
}


def _search(table: Mapping[str, Any]) -> Search:
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name in _ONE:
            if type(value) is not _ONE[name]:
                what = "true or false" if _ONE[name] is bool else "a whole number"
                raise ValueError(f"search.{name} = {value!r}: {what} is needed")
            values[name] = value
        elif name in _OF_A_LIST:
            values[name] = _list(f"search.{name}", value, *_OF_A_LIST[name])
        else:
            near = nearest(name, [field.name for field in fields(Search)])
            raise ValueError(f"search.{name} is unknown{near}")
    return Search(**values)


def _list(where: str, value: Any, kind: type, what: str) -> tuple[Any, ...]:
    right = (
        isinstance(value, list)
        and all(type(entry) is kind or (kind is float and type(entry) is int) for entry in value)
        and (kind is not list or all(type(n) is int for entry in value for n in entry))
    )
    if not right:
        raise ValueError(f"{where} = {value!r}: a list of {what} is needed")
    return tuple(tuple(entry) if kind is list else entry for entry in value)
