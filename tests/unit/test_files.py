"""Data from CSV, Parquet and Hugging Face datasets: what is read and what is refused. JSONL, which
shares the checks of a row, is in test_tasks."""

import builtins
import datetime
import json

import pytest

from twofold.config import TaskConfig
from twofold.tasks.load import load_task
from twofold.types import Prompt

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 3?"}]
ROWS = [
    {"prompt": CHAT, "answer": "5", "level": 1},
    {"prompt": CHAT[1:], "answer": None, "level": 2},
]


def train_prompts(**options):
    return load_task(TaskConfig(held_out=0, **options)).train


# ---------------------------------------------------------------- columns


def test_text_becomes_a_user_message_when_asked(tmp_path):
    file = tmp_path / "data.jsonl"
    rows = [{"question": "2 + 3?", "answer": "5"}, {"question": CHAT, "answer": "6"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    options = {"name": "jsonl", "path": str(file), "prompt_column": "question"}
    assert [p.content for p in train_prompts(**options)] == ["2 + 3?", CHAT]
    assert [p.content for p in train_prompts(**options, as_chat=True)] == [CHAT[1:], CHAT]


def test_only_the_named_columns_reach_the_reward(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completions": ["x"], "answer": 1, "id": 7}))
    options = {"name": "jsonl", "path": str(file)}
    with pytest.raises(ValueError, match="'completions' is what rewards call their argument"):
        train_prompts(**options)
    assert train_prompts(**options, columns=["answer"]) == [Prompt("a", {"answer": 1})]
    with pytest.raises(ValueError, match=r"data\.jsonl:1: no column 'anser' among prompt, .*; set"):
        train_prompts(**options, columns=["anser"])


# ---------------------------------------------------------------- CSV


def test_csv(tmp_path):
    file = tmp_path / "data.csv"
    text = (
        '\ufeffprompt,answer\r\n"2 + 3, quickly?",5\r\n\r\n"two\r\nlines, ""quoted""\u2028x",\r\n'
    )
    file.write_text(text, encoding="utf-8", newline="")
    assert train_prompts(name="csv", path=str(file)) == [
        Prompt("2 + 3, quickly?", {"answer": "5"}),
        Prompt('two\r\nlines, "quoted"\u2028x', {"answer": ""}),
    ]
    tabs = tmp_path / "data.tsv"
    tabs.write_text("prompt\tanswer\na, b\t" + "x" * 200_000)
    assert train_prompts(name="csv", path=str(tabs)) == [Prompt("a, b", {"answer": "x" * 200_000})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"data\.csv:1: no rows"),
        ("prompt,answer\n", r"data\.csv:1: no rows"),
        ("question,answer\na,b", r"data\.csv:2: no column 'prompt' among question, answer; set"),
        ("prompt,prompt\na,b", r"data\.csv:1: two columns have the same name"),
        ('prompt,answer\n"a\nb",1\na,b,c', r"data\.csv:4: 3 values for 2 columns; put values"),
        ("prompt,answer\na", r"data\.csv:2: 1 values for 2 columns"),
        ('prompt,answer\n"a,b', r"data\.csv:2: not CSV: unexpected end of data"),
        ("prompt,answer\n,b", r"data\.csv:2: column 'prompt' must be text"),
        (b"prompt\n\xff", r"task\.path: cannot read .*utf-8"),
    ],
)
def test_csv_errors_name_file_and_line(tmp_path, text, message):
    file = tmp_path / "data.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as caught:
        train_prompts(name="csv", path=str(file))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- Parquet


def write_parquet(path, rows):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


def test_parquet_keeps_types_and_drops_nulls_in_messages(tmp_path):
    tool = [{**message, "tool_calls": None} for message in CHAT]
    rows = [{**ROWS[0], "prompt": tool, "tags": ["a"], "score": 0.5}, {**ROWS[1], "tags": None}]
    path = write_parquet(tmp_path / "data.parquet", rows)
    assert train_prompts(name="parquet", path=path) == [
        Prompt(CHAT, {"answer": "5", "level": 1, "tags": ["a"], "score": 0.5}),
        Prompt(CHAT[1:], {"answer": None, "level": 2, "tags": None, "score": None}),
    ]


def test_a_folder_of_parquet_files_is_one_table(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / f"part-{i}.parquet", [{"prompt": f"{i}{j}"} for j in range(2)])
    prompts = train_prompts(name="parquet", path=str(tmp_path))
    assert [p.content for p in prompts] == ["00", "01", "10", "11", "20", "21"]


def test_parquet_refusals(tmp_path):
    path = write_parquet(
        tmp_path / "d.parquet", [{"prompt": "a", "x": 1, "on": datetime.date(2026, 1, 2)}]
    )
    with pytest.raises(ValueError, match="row 1: column 'on' holds date, which is no JSON; conv"):
        train_prompts(name="parquet", path=path)
    assert train_prompts(name="parquet", path=path, columns=["x"]) == [Prompt("a", {"x": 1})]
    (tmp_path / "no.parquet").write_text("prompt\na")
    for name in ("no.parquet", "none.parquet"):
        with pytest.raises(ValueError, match=r"task\.path: cannot read .*") as caught:
            train_prompts(name="parquet", path=str(tmp_path / name))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"d\.parquet:1: no rows"):
        train_prompts(name="parquet", path=write_parquet(tmp_path / "d.parquet", []))


# ---------------------------------------------------------------- Hugging Face


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def test_a_folder_of_data_files(tmp_path, datasets):
    folder = tmp_path / "data"
    folder.mkdir()
    for split, rows in {"train": ROWS, "test": ROWS[:1]}.items():
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = [Prompt(CHAT, {"answer": "5", "level": 1}), Prompt(CHAT[1:], {"answer": None,
                "level": 2})]  # fmt: skip
    options = {"name": "huggingface", "dataset": str(folder)}
    assert train_prompts(**options) == expected
    assert train_prompts(**options, split="test") == expected[:1]
    assert train_prompts(**options, columns=["level"])[0].columns == {"level": 1}
    with pytest.raises(ValueError, match=r"task\.dataset: cannot load .*") as caught:
        train_prompts(**options, split="tests")
    assert "\n" not in str(caught.value) and "tests" in str(caught.value)


def test_what_save_to_disk_wrote(tmp_path, datasets):
    table, second = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[1:])
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"a": table, "b": second}).save_to_disk(tmp_path / "two")
    options = {"name": "huggingface", "dataset": str(tmp_path / "one")}
    assert [p.content for p in train_prompts(**options)] == [CHAT, CHAT[1:]]
    with pytest.raises(ValueError, match=r"task\.split: .* has no split 'b'"):
        train_prompts(**options, split="b")
    options["dataset"] = str(tmp_path / "two")
    assert [p.content for p in train_prompts(**options, split="b")] == [CHAT[1:]]
    with pytest.raises(ValueError, match=r"task\.split: .* has no split 'train'"):
        train_prompts(**options)


def test_a_data_set_that_is_not_there(tmp_path, datasets):
    with pytest.raises(
        ValueError, match=r"task\.dataset: cannot load 'nobody/nothing': "
    ) as caught:
        train_prompts(name="huggingface", dataset="nobody/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"task\.dataset: the huggingface task needs a name"):
        train_prompts(name="huggingface")


@pytest.mark.parametrize(("name", "missing"), [("parquet", "pyarrow"), ("huggingface", "datasets")])
def test_what_is_not_installed_is_named_with_its_remedy(monkeypatch, tmp_path, name, missing):
    real = builtins.__import__

    def without(module, *args, **options):
        if module.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
        return real(module, *args, **options)

    import importlib

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ValueError, match=rf"needs {missing} .*pip install 'twofold\[data\]'"):
        train_prompts(name=name, path=str(tmp_path / "x"), dataset="x")
