"""Prompts from files and data sets: JSONL, CSV, Parquet, Hugging Face datasets.

Owns: reading each kind. Does not own: what a row must look like (`tasks.rows`), which rows are held
out (`tasks.load`). Importable without torch; pyarrow and datasets are imported by who needs them.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twofold.config import TaskConfig
from twofold.tasks.rows import TOO_DEEP, Row, prompts_of
from twofold.types import Prompt


def file_prompts(config: TaskConfig) -> list[Prompt]:
    """The prompts of `config.path` or `config.dataset`, in its order, as `config.name` reads it.
    Raises ValueError, one line, for what cannot be read or is no prompt."""
    prompts = prompts_of(READERS[config.name](config), config)
    if not prompts:
        raise ValueError(f"{config.path or config.dataset}:1: no rows; a row is one prompt")
    return prompts


def _path(config: TaskConfig) -> str:
    if not config.path:
        raise ValueError(f"task.path: the {config.name} task needs a file; give task.path")
    return config.path


def _text(path: str, encoding: str, newline: str | None = None) -> str:
    try:
        with open(path, encoding=encoding, newline=newline) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"task.path: cannot read {path}: {reason}") from None


# ---------------------------------------------------------------- JSONL, CSV


def _jsonl_rows(config: TaskConfig) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped."""
    path = _path(config)
    # not splitlines(): JSON strings may hold other line separators, such as U+2028
    for number, line in enumerate(_text(path, "utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"{where}: {TOO_DEEP}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a row is a JSON object, not {type(row).__name__}")
        yield where, row


def _csv_rows(config: TaskConfig) -> Iterator[Row]:
    """The first line names the columns; every value is text. A file NAME.tsv is separated by tabs.
    Spreadsheets begin their files with a mark of the byte order: it is skipped."""
    path = _path(config)
    csv.field_size_limit(2**31 - 1)  # a prompt may be longer than the 128 KiB it allows
    lines = io.StringIO(_text(path, "utf-8-sig", newline=""), newline="")
    reader = csv.reader(lines, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
    names: list[str] = []
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{where}: not CSV: {error}") from None
        if not names:
            names = fields
            if len(set(names)) < len(names):
                raise ValueError(f"{where}: two columns have the same name: {', '.join(names)}")
        elif fields:  # else a blank line
            if len(fields) != len(names):
                raise ValueError(
                    f"{where}: {len(fields)} values for {len(names)} columns; put values with "
                    "separators or line breaks in double quotes"
                )
            yield where, dict(zip(names, fields, strict=True))


# ---------------------------------------------------------------- Parquet, Hugging Face


def _import(module: str, config: TaskConfig) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"task.name = {config.name!r} needs {module.partition('.')[0]} ({error}); install it "
            "with pip install 'twofold[data]'"
        ) from None


def _parquet_rows(config: TaskConfig) -> Iterator[Row]:
    """A file, or a folder of files that make one table."""
    path = _path(config)
    parquet = _import("pyarrow.parquet", config)
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError, NotImplementedError) as error:  # what pyarrow's errors derive from
        raise ValueError(f"task.path: cannot read {path}: {_line(error)}") from None
    number = 0
    for batch in table.to_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path} row {number}", row


def _huggingface_rows(config: TaskConfig) -> Iterator[Row]:
    """A data set of the hub, a folder of data files, or one that `save_to_disk` wrote."""
    name = config.dataset
    if not name:
        raise ValueError("task.dataset: the huggingface task needs a name or a folder")
    datasets = _import("datasets", config)
    folder = Path(name)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[config.split]
            elif config.split not in ("train", str(loaded.split)):
                raise KeyError(config.split)
        else:
            loaded = datasets.load_dataset(name, config.subset or None, split=config.split)
    except KeyError:
        raise ValueError(f"task.split: {name} has no split {config.split!r}") from None
    except Exception as error:  # of many kinds, all about what was asked for
        raise ValueError(f"task.dataset: cannot load {name!r}: {_line(error)}") from None
    if config.columns:  # the others, images perhaps, are not even decoded
        wanted = {config.prompt_column, *config.columns}
        loaded = loaded.select_columns([c for c in loaded.column_names if c in wanted])
    for number, row in enumerate(loaded, start=1):
        yield f"{name} row {number}", row


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


READERS: dict[str, Callable[[TaskConfig], Iterator[Row]]] = {
    "jsonl": _jsonl_rows,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
    "huggingface": _huggingface_rows,
}
