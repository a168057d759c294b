"""The command line: what reaches the run, exit codes, errors in one line, help; threads; imports.

The work itself is replaced; `test_the_run_takes_what_the_commands_give` ties it to the real one.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import twofold
import twofold.runtime
from twofold import cli, config
from twofold.events import RunStarted
from twofold.obs.record import Record

SRC = Path(twofold.__file__).parents[1]


class FakeRun(ModuleType):
    """Stands in for `twofold.runtime.run` and `.ask`: notes its calls, answers `outcome`."""

    def __init__(self) -> None:
        super().__init__("twofold.runtime.run")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.outcome = "done"
        self.error: BaseException | None = None

    def _noted(self, name: str, result: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if self.error is not None:
                raise self.error
            return result()

        return call

    def _result(self) -> SimpleNamespace:
        return SimpleNamespace(outcome=self.outcome, run_dir=Path("runs/x-1"), version=3)

    @property
    def train(self) -> Callable[..., Any]:
        return self._noted("train", self._result)

    @property
    def resume(self) -> Callable[..., Any]:
        return self._noted("resume", self._result)

    @property
    def evaluate(self) -> Callable[..., Any]:
        return self._noted("evaluate", lambda: {"eval/pass_rate": 0.25})

    @property
    def generate(self) -> Callable[..., Any]:
        return self._noted("generate", lambda: ["five", "5\x1b[2J"])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    for name in ("run", "ask"):
        monkeypatch.setitem(sys.modules, f"twofold.runtime.{name}", fake)
        monkeypatch.setattr(twofold.runtime, name, fake, raising=False)
    # binding this process would bind the tests that follow
    monkeypatch.setattr(cli, "bind_threads", lambda n: f"threads  {n}")
    monkeypatch.setattr(twofold, "_bind", lambda n: f"threads  {n}")
    return fake


@pytest.fixture
def toml(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\n[run]\nthreads = 5\n")
    return str(path)


def fresh(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that has twofold and no thread settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))}
    env |= {"PYTHONPATH": str(SRC), **environment}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)


# ---------------------------------------------------------------- what reaches the run


def test_train_hands_on_file_and_overrides(
    run: FakeRun, toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--sched.max_staleness", "3", toml, "--train.learning_rate=0"]
    assert cli.main(words) == 0
    ((name, (options,), _),) = run.calls
    assert name == "train"
    assert options == config.load_config(
        toml, ["--sched.max_staleness=3", "--train.learning_rate=0"]
    )
    assert options.train.steps == 7
    assert capsys.readouterr().out.splitlines() == ["threads  5", "done at step 3: runs/x-1"]


@pytest.mark.parametrize(
    ("outcome", "code", "resumable"),
    [
        ("done", 0, False),
        ("stopped: Ctrl-C", 130, True),
        ("stopped: SIGTERM", 143, True),
        ("failed: no data", 1, False),
    ],
)
def test_exit_codes(
    run: FakeRun,
    toml: str,
    capsys: pytest.CaptureFixture[str],
    outcome: str,
    code: int,
    resumable: bool,
) -> None:
    run.outcome = outcome
    assert cli.main(["train", toml]) == code
    assert ("twofold resume runs/x-1" in capsys.readouterr().out) is resumable


def test_an_interrupt_before_the_run_handles_it(run: FakeRun, toml: str) -> None:
    run.error = KeyboardInterrupt()
    assert cli.main(["train", toml]) == 130


def test_resume_reads_the_threads_of_the_run(
    run: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_run = config.from_dict({"run": {"threads": 4}})
    Record.create(tmp_path, {"config": config.to_dict(of_run)}).close()
    assert cli.main(["resume", str(tmp_path)]) == 0
    assert run.calls[0][:2] == ("resume", (str(tmp_path),))
    assert "threads  4" in capsys.readouterr().out


def test_eval_takes_options_from_the_run(
    run: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[task]\nname = "jsonl"\npath = "a.jsonl"\n[run]\neval_samples = 3\n'
    (tmp_path / "config.toml").write_text(text)
    target = f"{tmp_path}@20"
    assert cli.main(["eval", target, "--task.held_out=5"]) == 0
    assert cli.main(["eval", target, "--greedy", "--task", "addition"]) == 0
    assert cli.main(["eval", "somewhere", "--samples", "2"]) == 0
    of_run, greedy, of_model = [args for _, args, _ in run.calls]
    assert of_run[0] == target
    assert (of_run[1].task.path, of_run[1].task.held_out, of_run[2]) == ("a.jsonl", 5, 3)
    assert (greedy[1].task.name, greedy[2]) == ("addition", 0)
    assert of_model[:3] == ("somewhere", config.Config(), 2)
    assert "eval/pass_rate           0.2500" in capsys.readouterr().out


def test_generate(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "somewhere", "2 + 3?", "--temperature", "0", "--samples", "2"]
    assert cli.main(words) == 0
    assert run.calls == [("generate", ("somewhere", "2 + 3?", 128, 0.0, 0, 2), {})]
    out = capsys.readouterr().out
    assert out.splitlines() == ["--- sample 0", "five", "--- sample 1", "5\\x1b[2J"]


def test_log_and_samples_read_a_record_that_is_being_written(
    run: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Record.create(tmp_path, {}) as record:
        record.commit(0.5, RunStarted(), [], [])
        assert cli.main(["log", str(tmp_path)]) == 0
        assert cli.main(["samples", str(tmp_path), "--sort", "best", "-n", "2"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["kind"] == "RunStarted"
    assert "no sample is finished yet" in captured.err


def test_the_run_takes_what_the_commands_give(tmp_path: Path, toml: str) -> None:
    from twofold.runtime import ask
    from twofold.runtime import run as real

    fake = FakeRun()
    Record.create(tmp_path, {"config": {}}).close()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run", "ask"):
            patch.setitem(sys.modules, f"twofold.runtime.{name}", fake)
            patch.setattr(twofold.runtime, name, fake)
        patch.setattr(cli, "bind_threads", lambda n: "")
        patch.setattr(twofold, "_bind", lambda n: "")
        for words in (["train", toml], ["resume", str(tmp_path)], ["eval", "x"]):
            assert cli.main(words) == 0
        assert cli.main(["generate", "x", "y"]) == 0
        twofold.train({"train": {"steps": 2}}, reward=len)
        twofold.resume(tmp_path)
    assert len(fake.calls) == 6
    for name, args, kwargs in fake.calls:
        inspect.signature((vars(real) | vars(ask))[name]).bind(*args, **kwargs)


# ---------------------------------------------------------------- errors and help


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "CONFIG", "--train.lerning_rate", "1"], "did you mean train.learning_rate?"),
        (["train", "CONFIG", "--lerning_rate", "1"], "did you mean train.learning_rate?"),
        (["train", "CONFIG", "--steps", "1"], "steps is not an option; did you mean train.steps?"),
        (["train", "CONFIG", "--train.steps", "x"], "train.steps = 'x' is not a whole number"),
        (["train", "CONFIG", "--train.steps"], "train.steps needs a value"),
        (["train", "nowhere.toml"], "cannot read nowhere.toml: No such file or directory"),
        (["resume", "nowhere"], "nowhere holds no run"),
        (["samples", "nowhere"], "nowhere"),
        (["log", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: FakeRun, toml: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main([toml if word == "CONFIG" else word for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("twofold: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert run.calls == []


def test_an_error_of_the_run_is_one_line_unless_the_traceback_is_asked_for(
    run: FakeRun, toml: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.error = ValueError("model 'x' not found")
    assert cli.main(["train", toml]) == 2
    assert capsys.readouterr().err == "twofold: error: model 'x' not found\n"
    monkeypatch.setenv("TWOFOLD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="not found"):
        cli.main(["train", toml])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["trian"],
        ["train"],
        ["resume", "RUN", "--train.steps", "3"],
        ["generate", "m", "p", "--samples", "0"],
        ["generate", "m", "p", "--temperature", "-1"],
        ["samples", "RUN", "--sort", "random"],
    ],
)
def test_what_argparse_refuses(run: FakeRun, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert run.calls == []


def test_train_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())
    for option in config.OPTIONS.values():
        assert f"\n  --{option.name} " in out
        assert option.help in words
    assert "--train.steps training steps [30]" in words
    assert "(constant, linear, cosine) [constant]" in words
    assert all(len(line) <= 120 for line in out.splitlines())


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """`twofold train --help | head -1`"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from twofold.cli import main; sys.exit(main(['log', sys.argv[1]]))"
    lines = "from twofold.obs import samples; samples.log_lines = lambda record: ['x' * 9] * 99999;"
    record = (
        "from twofold.obs.record import Record; import contextlib;"
        "Record.open = lambda *a, **k: contextlib.nullcontext();"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    process = subprocess.run(
        [sys.executable, "-c", lines + record + code, str(tmp_path)],
        env=env,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert (process.returncode, process.stderr) == (0, "")


# ---------------------------------------------------------------- from Python


def test_train_from_python_takes_a_config_a_dict_or_a_path(run: FakeRun, toml: str) -> None:
    def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    for given in (toml, Path(toml), {"train": {"steps": 7}, "run": {"threads": 5}}):
        assert twofold.train(given, reward=reward).outcome == "done"
    assert twofold.train(config.load_config(toml)).outcome == "done"
    expected = config.load_config(toml)
    assert [args[0] for _, args, _ in run.calls] == [expected] * 4
    assert [args[1] for _, args, _ in run.calls] == [reward, reward, reward, None]
    with pytest.raises(ValueError, match=r"train\.steps = 0 is refused"):
        twofold.train({"train": {"steps": 0}})


def test_import_is_fast_and_needs_no_torch() -> None:
    code = (
        "import time, sys; start = time.perf_counter(); import twofold, twofold.cli; "
        "seconds = time.perf_counter() - start; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'ray') if m in sys.modules]); "
        "print(seconds); print(twofold.Config.__name__, twofold.__version__)"
    )
    done = fresh("-c", code)
    assert done.returncode == 0, done.stderr
    loaded, seconds, names = done.stdout.splitlines()
    assert loaded == "[]"
    assert float(seconds) < 1.0  # 0.1 on a quiet machine
    assert names == f"Config {twofold.__version__}"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        twofold.nothing  # noqa: B018


# ---------------------------------------------------------------- threads

_BIND = (
    "import os; from twofold.threads import bind_threads, usable_cpus, physical_cores; "
    "cpus = os.sched_getaffinity(0); line = bind_threads({n}); print(line); "
    "print(os.environ['OMP_NUM_THREADS'], os.environ.get('OMP_PROC_BIND'), physical_cores(cpus)); "
)


def test_threads_are_one_per_core_and_bound() -> None:
    done = fresh("-c", _BIND.format(n=0))
    line, chosen = done.stdout.splitlines()
    threads, bind, cores = chosen.split()
    assert threads == cores
    assert bind == "close"
    assert (
        line == f"threads  {cores} (one per physical core), OMP_PROC_BIND=close, OMP_PLACES=cores"
    )


def test_what_the_user_has_set_stays() -> None:
    done = fresh("-c", _BIND.format(n=1), OMP_NUM_THREADS="1", OMP_PROC_BIND="false")
    assert done.stdout.splitlines()[1].startswith("1 false ")
    assert "threads  1 (OMP_NUM_THREADS is set), OMP_PROC_BIND=false" in done.stdout


def test_more_threads_than_cores_are_not_bound() -> None:
    done = fresh("-c", _BIND.format(n=4096))
    assert done.stdout.splitlines()[1].startswith("4096 None ")
    assert "not bound" in done.stdout


def test_binding_works_in_torch_and_children_can_have_all_cpus() -> None:
    code = _BIND.format(n=1) + (
        "import torch; print(torch.get_num_threads(), usable_cpus() == cpus, "
        "bind_threads(7) == line)"
    )
    done = fresh("-c", code)
    assert done.stdout.splitlines()[2] == "1 True True", done.stderr


def test_a_python_program_that_loaded_torch_first_is_told() -> None:
    code = (
        "import sys, os; sys.modules['torch'] = sys; import twofold; print(twofold._bind(2)); "
        "print('OMP_NUM_THREADS' in os.environ)"
    )
    line, is_set = fresh("-c", code).stdout.splitlines()
    assert line.startswith("threads  left as they are: torch was loaded before")
    assert is_set == "False"


def test_binding_too_late_is_our_mistake() -> None:
    code = "import sys; sys.modules['torch'] = sys; import twofold.threads as t; t.bind_threads(0)"
    assert "AssertionError: bind_threads() is too late" in fresh("-c", code).stderr
