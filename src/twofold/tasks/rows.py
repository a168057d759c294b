"""From rows of a data set to prompts: which column is asked, what the others must be.

Owns: the checks of one row, whatever kind of file it came from. Does not own: reading files
(`tasks.files`). Importable without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from twofold.config import TaskConfig
from twofold.types import Prompt

Row = tuple[str, dict[str, Any]]
"""Where it stands, for messages ("sums.jsonl:3"), and its columns."""

# what a reward is called with besides the columns
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
# rows are written as JSON and pickled later, which fails where Python's stack ends (1000 calls)
MAX_NESTING = 100
TOO_DEEP = f"lists or objects are nested deeper than {MAX_NESTING}; flatten them"


def prompts_of(rows: Iterable[Row], config: TaskConfig) -> list[Prompt]:
    """One prompt a row, in order. `task.prompt_column` holds chat messages ([{"role": ...,
    "content": ...}, ...]) or text, `task.columns` (empty: all) go to the reward. All rows have the
    same columns. Raises ValueError that names the row."""
    prompts: list[Prompt] = []
    columns: set[str] = set()
    for where, row in rows:
        try:
            row = _chosen(row, config)
            columns = columns or set(row)
            if set(row) != columns:
                odd = ", ".join(sorted(set(row) ^ columns))
                raise ValueError(
                    f"columns differ from the first row's: {odd}; write null where there is none"
                )
            for name, value in row.items():
                _check_json(value, name, MAX_NESTING)
            content = _content(row.pop(config.prompt_column), config.prompt_column)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if config.as_chat and isinstance(content, str):
            content = [{"role": "user", "content": content}]
        prompts.append(Prompt(content, row))
    return prompts


def _chosen(row: dict[str, Any], config: TaskConfig) -> dict[str, Any]:
    """The columns that are wanted, with names that can be."""
    there = ", ".join(row) or "none"
    if config.prompt_column not in row:
        raise ValueError(
            f"no column {config.prompt_column!r} among {there}; set task.prompt_column"
        )
    wanted = list(row)
    if config.columns:
        wanted = [config.prompt_column, *config.columns]
        if missing := [name for name in wanted if name not in row]:
            raise ValueError(f"no column {missing[0]!r} among {there}; set task.columns")
    for name in RESERVED_COLUMNS:
        if name in wanted and name != config.prompt_column:
            raise ValueError(f"column {name!r} is what rewards call their argument; rename it")
    return {name: row[name] for name in wanted}


def _check_json(value: Any, column: str, levels: int) -> None:
    """The record holds JSON: what else a table can hold (dates, bytes, images) is refused."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if not isinstance(value, dict | list) or (
        isinstance(value, dict) and not all(isinstance(name, str) for name in value)
    ):
        raise ValueError(
            f"column {column!r} holds {type(value).__name__}, which is no JSON; convert it, or "
            "leave it out with task.columns"
        )
    if levels == 1:
        raise ValueError(TOO_DEEP)
    for inner in value.values() if isinstance(value, dict) else value:
        _check_json(inner, column, levels - 1)


def _content(prompt: Any, column: str) -> list[dict[str, str]] | str:
    if isinstance(prompt, str) and prompt:
        _check_text(prompt, column)
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"column {column!r} must be text or a list of chat messages, not empty")
    return [_message(message, column) for message in prompt]


def _message(message: Any, column: str) -> dict[str, str]:
    """A table gives every message the keys that any has: those without a value are left out."""
    given = message
    if isinstance(message, dict):
        given = {key: value for key, value in message.items() if value is not None}
    if not (
        isinstance(given, dict)
        and set(given) == {"role", "content"}
        and all(isinstance(value, str) for value in given.values())
    ):
        raise ValueError(
            f'column {column!r}: a chat message is {{"role": text, "content": text}}, '
            f"not {json.dumps(message)[:80]}"
        )
    for text in given.values():
        _check_text(text, column)
    return given


def _check_text(text: str, column: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"column {column!r}: character {error.start + 1} is {half}, half of a surrogate pair "
            "and no text; remove it"
        ) from None
