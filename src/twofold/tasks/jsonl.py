"""Prompts from a JSONL file: one JSON object a line, one column the prompt, the rest for rewards.

Owns: reading and checking the file. Importable without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twofold.types import Prompt

# what a reward is called with besides the columns
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
# rows are written as JSON and pickled later, which fails where Python's stack ends (1000 calls)
MAX_NESTING = 100
_TOO_DEEP = f"lists or objects are nested deeper than {MAX_NESTING}; flatten them"


def jsonl_prompts(path: str, prompt_column: str) -> list[Prompt]:
    """Prompts of a file in file order; blank lines are skipped.

    `prompt_column` holds chat messages ([{"role": ..., "content": ...}, ...]) or plain text, every
    other column goes to the reward. All rows have the same columns. Raises ValueError that names
    file and line.
    """
    if not path:
        raise ValueError("task.path: the jsonl task needs a file; give task.path")
    try:
        # not splitlines(): JSON strings may hold other line separators, such as U+2028
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task.path: cannot read {path}: {error}") from None
    prompts: list[Prompt] = []
    columns: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _row(line, prompt_column)
            columns = columns or set(row)
            if set(row) != columns:
                odd = ", ".join(sorted(set(row) ^ columns))
                raise ValueError(
                    f"columns differ from the first row's: {odd}; write null where there is none"
                )
            prompts.append(Prompt(row.pop(prompt_column), row))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path}:1: no rows; write one JSON object a line")
    return prompts


def _row(line: str, prompt_column: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _deeper_than(MAX_NESTING, row):
        raise ValueError(_TOO_DEEP)
    if not isinstance(row, dict):
        raise ValueError(f"a row is a JSON object, not {type(row).__name__}")
    if prompt_column not in row:
        raise ValueError(
            f"no column {prompt_column!r} among {', '.join(row) or 'none'}; set task.prompt_column"
        )
    for name in RESERVED_COLUMNS:
        if name in row and name != prompt_column:
            raise ValueError(f"column {name!r} is what rewards call their argument; rename it")
    _check_prompt(row[prompt_column], prompt_column)
    return row


def _deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, item) for item in inner)


def _check_prompt(prompt: Any, column: str) -> None:
    if isinstance(prompt, str) and prompt:
        _check_text(prompt, column)
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"column {column!r} must be text or a list of chat messages, not empty")
    for message in prompt:
        if not (
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and all(isinstance(value, str) for value in message.values())
        ):
            raise ValueError(
                f'column {column!r}: a chat message is {{"role": text, "content": text}}, '
                f"not {json.dumps(message)[:80]}"
            )
        for text in message.values():
            _check_text(text, column)


def _check_text(text: str, column: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"column {column!r}: character {error.start + 1} is {half}, half of a surrogate pair "
            "and no text; remove it"
        ) from None
