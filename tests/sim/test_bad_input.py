"""Whatever a file says, a command ends with 2 and one line that names the field, the value and what
to do; no traceback.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from random import Random

import pytest
from tests.sim.test_calibrate import SEED, config, real_looking, work

from twofold import cli
from twofold.config import to_toml
from twofold.sim import calibrate
from twofold.sim import run as simulated
from twofold.sim.cost import Costs

EXAMPLE = (Path(__file__).parents[2] / "examples/clusters/h100_node.toml").read_text()
WORKLOAD = """\
seed = 0
group_size = 4
prompt_tokens = [4, 20]
lengths = {kind = "lognormal", median_tokens = 10, sigma = 1.0, max_tokens = 24}
pass_rate = {alpha = 1.0, beta = 2.0}
reward_s = 0.2
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same options, whose records look like those of real ones."""
    folder = tmp_path_factory.mktemp("runs")
    options = config(train__steps=3)
    real_looking(folder / "one", options)
    real_looking(folder / "two", options, work(seed=SEED + 1))
    return folder


@pytest.fixture
def files(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(to_toml(config(train__steps=3)))
    return tmp_path


@pytest.fixture(scope="module")
def calibration(runs: Path) -> str:
    calibrate.save(calibrate.calibrate([runs / "one"]), runs / "calibration.toml")
    return (runs / "calibration.toml").read_text()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("twofold: error: ") and error.count("\n") == 1, error
    return error


def changed(text: str, before: str, after: str) -> str:
    made, n = re.subn(before, after.replace("\\", "\\\\"), text, count=1, flags=re.M | re.S)
    assert n == 1, before
    return made


# ---------------------------------------------------------------- clusters


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("per_supernode = 8", "per_supernode = 0", r"cluster.cards_per_supernode = 0: it must be"),
        ("per_supernode = 8", "per_supernode = -8", r"cards_per_supernode = -8: it must be"),
        ("per_supernode = 8", "per_supernode = 1000000", r"= 1000000: at most 100000 cards"),
        ("per_supernode = 8", "per_supernode = '8'", r"= '8': a whole number is needed"),
        ("per_supernode = 8", "per_supernode = 8.5", r"= 8.5: a whole number is needed"),
        ("= 64e9", "= -64e9", r"links.host_bytes_per_s = -6.4e\+10: it must be finite and above 0"),
        ("= 64e9", "= nan", r"cluster.links.host_bytes_per_s = nan: it must be finite"),
        ("= 64e9", "= inf", r"cluster.links.host_bytes_per_s = inf: it must be finite"),
        ("= 64e9", "= 'fast'", r"links.host_bytes_per_s = 'fast': a number is needed"),
        ("host_bytes", "hots_bytes", r"hots_bytes_per_s is unknown; did you mean host_bytes_per_s"),
        ("host_bytes_per_s[^\n]*\n", "", r"links.host_bytes_per_s is missing: give it"),
        ("latency_s", "infiniband", r"cluster.links.infiniband is unknown; there are: supernode_"),
        ("memory_bytes = 80e9", "memory_bytes = 0", r"cluster.card.memory_bytes = 0: it must be"),
        (r"train = 0.35", "train = 1.5", r"efficiency.train = 1.5: it is a share, 1 at most"),
        (r"\[cluster.card\]", "[cluster.cards]", r"cluster.cards is unknown; did you mean"),
        (r"\[cluster.card\].*?\[", "[", r"cluster.card is None: a table is needed"),
        (r"\[model\]", "[modell]", r"modell is unknown; did you mean model"),
        (r"layers = 28", "layers = 0", r"model.layers = 0: it must be finite and above 0"),
        (r"\[search\]", "[saerch]", r"saerch is unknown; did you mean search"),
        (r"^quanta", "quantums", r"search.quantums is unknown; did you mean quanta"),
        (r"\[16, 64\]", "[0]", r"search.quanta = 0: give 1 or more"),
        (r"\[16, 64\]", "16", r"search.quanta = 16: a list of whole numbers is needed"),
        (r"\[0.25, 0.5, 0.75\]", "[1.5]", r"search.splits = 1.5: give a share between 0 and 1"),
        (r"staleness = \[.*?\]", "staleness = [-1]", r"search.staleness = -1: give 0 or more"),
        (r"staleness", "cards_per_replica = [3]\nstaleness", r"= 3: none divides the 8 cards"),
        (r"memory_bytes = 80e9", "memory_bytes = 5e9", r"nothing fits: .* lacks [\d.]+ GB a card"),
        (r"= 8$", "= = 8", r"cluster.toml is not a TOML file: "),
        (r".*", "", r"\[cluster\] is missing: describe the cards"),
        (r".*", "cluster = 8", r"cluster = 8: a table is needed"),
    ],
)
def test_a_cluster_that_cannot_be(
    before: str, after: str, message: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cluster.toml").write_text(changed(EXAMPLE, before, after))
    error = refused(capsys, "plan", "run.toml", "--cluster", "cluster.toml")
    assert re.search(message, error), error


# ---------------------------------------------------------------- calibrations


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("^format = 1", "format = 2", "format = 2, this Twofold reads 1: calibrate anew"),
        ("^format = 1", "format = '1'", "format = '1', this Twofold reads 1"),
        ("^format = 1", "", "'format' is missing"),
        ("^train_s = [^\n]*", "train_s = -1", "costs.train_s = -1.0: seconds are finite"),
        ("^train_s = [^\n]*", "train_s = nan", "costs.train_s = nan: seconds are finite"),
        ("^train_s = [^\n]*", "train_s = '1'", "costs.train_s = '1': a number is needed"),
        ("^train_s", "trian_s", "costs.trian_s is unknown; did you mean train_s"),
        (r"^\[costs\]", "[cost]", "'costs' is missing"),
        (r"lengths = \[\d+", "lengths = [0", r"groups\[0\].lengths = \[0, .*, 1 or more"),
        (r"lengths = \[\d+, ", "lengths = [", r"groups\[\d\].*(samples|give 0 to 3)"),
        ("n_valid = 4", "n_valid = 5", r"groups\[0\].n_valid = 5: give 0 to 4"),
        ("reward_s = ", "reward_s = -", r"groups\[0\].reward_s = -.*: give 0 or more"),
        ("prompt_tokens", "prompt_tokns", r"prompt_tokns is unknown; did you mean prompt_tokens"),
        (r"^groups = .*?^\]", "groups = []", r"groups = \[\]: one group at least"),
        (r"\[costs\].*", "", "'costs' is missing"),
        (r"lengths = \[.*", "lengths = [", "is not a calibration: "),
    ],
)
def test_a_damaged_calibration(
    before: str,
    after: str,
    message: str,
    calibration: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("c.toml").write_text(changed(calibration, before, after))
    for command in ("plan", "sim"):
        error = refused(capsys, command, "run.toml", "--calibration", "c.toml")
        assert "c.toml" in error and re.search(message, error), error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.name", "another"], "model.name = another: the calibration is of smollm2-135m"),
        (["--model.dtype", "bfloat16"], "model.dtype = bfloat16: the calibration is of auto"),
        (["--run.threads", "7"], "run.threads = 7: the calibration is of 2; give --run.threads 2"),
        (["--rollout.group_size", "8"], "rollout.group_size = 8, but the recorded groups have 4"),
    ],
)
def test_a_calibration_of_something_else(
    words: list[str],
    message: str,
    calibration: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("c.toml").write_text(calibration)
    for command in ("plan", "sim"):
        assert message in refused(capsys, command, "run.toml", "--calibration", "c.toml", *words)


# ---------------------------------------------------------------- workloads


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("reward_s = 0.2", "reward_s = -1", "reward_s = -1: give seconds above 0"),
        ("reward_s = 0.2", "invalid = -0.5", "invalid = -0.5: give a share from 0 to 1"),
        ("alpha = 1.0", "alpha = -1.0", "pass_rate.alpha = -1.0: give more than 0"),
        (r"\{alpha.*?\}", "[-0.1]", "pass_rate = -0.1: give a share from 0 to 1"),
        ("sigma = 1.0", "sigma = nan", "lengths.sigma = nan: give 0 or more"),
        ("sigma", "sgima", "lengths.sgima is not known; did you mean lengths.sigma"),
        ("median_tokens = 10", "median_tokens = 'x'", "lengths.median_tokens = 'x' is not a num"),
        (r"\[4, 20\]", "[inf, nan]", r"prompt_tokens = \[inf, nan\]: give \[least, most\]"),
        (r"\[4, 20\]", "[20, 4]", r"prompt_tokens = \[20, 4\]: give \[least, most\]"),
        ('"lognormal"', "['x']", "give a table with kind = lognormal or pareto"),
        ("group_size = 4", "group_size = 8", "group_size = 4, the workload's is 8: make them"),
        ("max_tokens = 24", "max_tokens = 999", "max_new_tokens = 300, the workload has .* 999"),
        ("reward_s", "n_groups = 3\nreward_s", "n_groups = 3: the workload ends before"),
        ("reward_s", "bad_group = 1.0\nreward_s", "ended before its last step: failed: 33 groups"),
        ("seed = 0", "seed 0", "w.toml: .*; it is not a TOML file"),
    ],
)
def test_a_workload_that_cannot_be(
    before: str,
    after: str,
    message: str,
    calibration: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("c.toml").write_text(calibration)
    Path("w.toml").write_text(changed(WORKLOAD, before, after))
    error = refused(
        capsys, "plan", "run.toml", "--calibration", "c.toml", "--workload", "w.toml",
        "--try", "sched.max_staleness=1",
    )  # fmt: skip
    assert re.search(message, error), error


# ---------------------------------------------------------------- words on the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plan needs --calibration FILE"),
        (["--cluster", "none.toml"], "cannot read none.toml: No such file"),
        (["--calibration", "none.toml"], "cannot read none.toml: No such file"),
        (["--calibration", "c.toml", "--workload", "none.toml"], "cannot read none.toml"),
        (["--calibration", "random"], "random is not a calibration: "),
        (["--cluster", "random"], "random is not a TOML file: "),
        (["--cluster", "k.toml", "--try", "sched.max_staleness=0"], "--try is for this machine"),
        (["--calibration", "c.toml", "--try", "sched.max_stalenes=0"], "did you mean sched.max_st"),
        (
            ["--calibration", "c.toml", "--try", "train.gamma=1"],
            "do not depend on it; one of sched",
        ),
        (
            ["--calibration", "c.toml", "--try", "sched.max_staleness=a"],
            "'a' is not a whole number",
        ),
        (["--calibration", "c.toml", "--try", "=1"], "--try names no option"),
        (["--calibration", "c.toml", "--timeline", "none/t.json"], "none/t.json cannot be written"),
        (["--cluster", "k.toml", "--timeline", "."], "--timeline . cannot be written"),
        (["--calibration", "c.toml", "--sched.max_stalenes", "0"], "did you mean sched.max_stale"),
    ],
)
def test_wrong_words(
    words: list[str],
    message: str,
    calibration: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("c.toml").write_text(calibration)
    Path("k.toml").write_text(EXAMPLE)
    Path("random").write_bytes(Random(SEED).randbytes(4000))
    assert message in refused(capsys, "plan", "run.toml", *words)
    assert not Path("none").exists()


# ---------------------------------------------------------------- records


def copy(runs: Path, to: Path) -> Path:
    (to / "run").mkdir()
    body = (runs / "one" / "record.sqlite").read_bytes()
    (to / "run" / "record.sqlite").write_bytes(body)
    return to / "run"


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_record(
    kept: float, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy(runs, tmp_path) / "record.sqlite"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    assert str(path.parent) in refused(capsys, "calibrate", str(path.parent))


def test_random_bytes_are_no_record(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy(runs, tmp_path) / "record.sqlite"
    path.write_bytes(Random(SEED).randbytes(20_000))
    assert "file is not a database" in refused(capsys, "calibrate", str(path.parent))


def test_scattered_damage_never_ends_in_a_traceback(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What hits bytes that nothing reads (ids of tokens, say) is not noticed."""
    path = copy(runs, tmp_path) / "record.sqlite"
    whole, random, n_noticed = path.read_bytes(), Random(SEED), 0
    for _ in range(10):
        body, at, n = bytearray(whole), random.randrange(len(whole)), random.choice((4, 60, 3000))
        body[at : at + n] = random.randbytes(len(body[at : at + n]))
        path.write_bytes(body)
        code = cli.main(["calibrate", str(path.parent)])
        assert code in (0, 2) and capsys.readouterr().err.count("\n") == (code == 2), (SEED, at, n)
        n_noticed += code == 2
    assert n_noticed > 2


@pytest.mark.parametrize("table", ["events", "commands", "groups", "samples", "chunks", "versions"])
def test_a_row_is_missing(
    table: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(runs, tmp_path)
    key = {"samples": "group_id, idx", "chunks": "group_id, idx, start"}.get(table, "rowid")
    with sqlite3.connect(folder / "record.sqlite") as db:
        some = f"SELECT {key} FROM {table} ORDER BY 1 LIMIT 1 OFFSET 2"
        db.execute(f"DELETE FROM {table} WHERE ({key}) = ({some})")
    error = refused(capsys, "calibrate", str(folder))
    assert str(folder) in error and "the record is damaged" in error


@pytest.mark.parametrize("table", ["events", "commands", "groups", "samples", "chunks"])
def test_rows_of_another_run(
    table: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(runs, tmp_path)
    with sqlite3.connect(folder / "record.sqlite") as db:
        db.execute("ATTACH ? AS other", (str(runs / "two" / "record.sqlite"),))
        columns = ", ".join(row[1] for row in db.execute(f"PRAGMA main.table_info({table})"))
        db.execute(f"DELETE FROM main.{table}")
        db.execute(f"INSERT INTO main.{table}({columns}) SELECT {columns} FROM other.{table}")
    error = refused(capsys, "calibrate", str(folder))
    assert "records of two runs are mixed: " in error and "give the record as the run" in error


def test_a_folder_with_the_options_of_another_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy(runs, tmp_path)
    (folder / "config.toml").write_text(to_toml(config(train__steps=3)))
    assert cli.main(["calibrate", str(folder)]) == 0
    capsys.readouterr()
    (folder / "config.toml").write_text(to_toml(config(train__steps=3, sched__max_staleness=3)))
    error = refused(capsys, "calibrate", str(folder))
    assert "is of another run than the record: sched.max_staleness is 3 there and 1" in error


def test_a_simulated_run_calibrates_nothing(
    files: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = config(train__steps=2)
    simulated.run(options, Costs(), work(), files / "simulated")
    for words in (["simulated"], [str(runs / "one"), "--held-out", "simulated"]):
        assert "simulated is a simulated run" in refused(capsys, "calibrate", *words)
    with sqlite3.connect(files / "simulated" / "record.sqlite") as db:
        db.execute("UPDATE versions SET checksum = 'abc'")  # as if it had weights
    assert "simulated is a simulated run" in refused(capsys, "calibrate", "simulated")


# ---------------------------------------------------------------- what a simulation is written to


@pytest.mark.parametrize(
    ("command", "out", "message"),
    [
        ("sim", "run.toml/x", "--out run.toml/x cannot be written (Not a directory): name a new"),
        ("sim", "run.toml", "--out run.toml cannot be written (File exists): name a new folder"),
        ("sim", "/proc/x", "--out /proc/x cannot be written (No such file or directory): name"),
    ],
)
def test_a_target_that_cannot_be_written(
    command: str,
    out: str,
    message: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refused(capsys, command, "run.toml", "--out", out)


@pytest.mark.parametrize("added", ["bad_group = 1.0", "n_groups = 0"])
def test_a_simulation_without_a_step_leaves_nothing(
    added: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("w.toml").write_text(changed(WORKLOAD, "reward_s", f"{added}\nreward_s"))
    for _ in range(2):  # the second time as the first
        error = refused(capsys, "sim", "run.toml", "--workload", "w.toml", "--out", "simulated")
        assert "ended before its first step (" in error and "change the workload" in error
        assert not Path("simulated").exists()


def test_a_simulation_whose_workload_ends(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("w.toml").write_text(changed(WORKLOAD, "reward_s", "n_groups = 7\nreward_s"))
    assert cli.main(["sim", "run.toml", "--workload", "w.toml"]) == 0  # 2 steps of 3 groups
    assert "done: 2 steps" in capsys.readouterr().out


def test_a_simulation_that_ends_early_has_failed(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("w.toml").write_text(changed(WORKLOAD, "reward_s", "bad_group = 0.2\nreward_s"))
    words = ["sim", "run.toml", "--workload", "w.toml", "--train.steps", "20"]
    assert cli.main([*words, "--sched.max_drops_per_step", "2"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"failed: 3 groups dropped in step \d+, .*: \d+ steps", out)


def test_an_interrupted_simulation_leaves_nothing(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, n_done: int, n_all: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli._Counted, "__call__", interrupt)
    assert cli.main(["sim", "run.toml", "--out", "simulated"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not Path("simulated").exists()


def test_a_long_simulation_says_how_far_it_is(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10_000, 3))
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(seconds))
    assert cli.main(["sim", "run.toml"]) == 0
    assert capsys.readouterr().err == "".join(f"simulated {n} of 3 steps\n" for n in (1, 2, 3))
