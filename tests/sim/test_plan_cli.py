"""`twofold plan`: both questions through the command line, and the variations of this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from twofold import cli
from twofold.config import Config, load_config, to_toml
from twofold.sim import calibrate, here
from twofold.sim.calibrate import Calibration
from twofold.sim.cost import Costs
from twofold.sim.here import Here, plan_here, variations
from twofold.sim.ranking import choose
from twofold.sim.workload import Workload

STEPS = 5
EXAMPLES = Path(__file__).parents[2] / "examples"
# decoding few samples costs as much as many: a full batch pays, and so does asynchrony
PER_STEP = Costs(decode_step_s=0.1, prefill_token_s=0.0, train_s=0.1, train_token_s=1e-4, eval_s=9)
# a token costs the same however many are sampled at once: nothing is gained
PER_TOKEN = Costs(decode_step_s=0.0, decode_token_s=0.01, prefill_token_s=0.0, train_s=0.1)


def config(**changes: Any) -> Config:
    made = Config()
    made.rollout.group_size, made.rollout.max_new_tokens = 4, 64
    made.rollout.max_running_samples, made.rollout.quantum_decode_steps = 8, 8
    made.sched.groups_per_step, made.sched.max_staleness = 2, 1
    made.train.steps, made.run.checkpoint_every = STEPS, 0
    for name, value in changes.items():
        section, _, option = name.partition("__")
        setattr(getattr(made, section), option, value)
    return made


def calibration(costs: Costs = PER_STEP) -> Calibration:
    drawn = Workload(5, 4, 64, long_tail=0.2, reward_s=1e-3)
    groups = tuple(drawn.group(i) for i in range(16))
    machine = {"model": Config().model.name, "dtype": "float32", "device": "cpu", "threads": "1"}
    return Calibration(costs, groups, machine, ("runs/a-1",))


def one_replica_size(**changes: str) -> None:
    """Writes small.toml: the example with less to search."""
    text = (EXAMPLES / "clusters/h100_node.toml").read_text()
    changes = {"[search]": "[search]\ncards_per_replica = [2]", "[16, 64]": "[16]", **changes}
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    Path("small.toml").write_text(text)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(to_toml(config()))
    calibrate.save(calibration(), tmp_path / "calibration.toml")
    return tmp_path


HERE = ["plan", "run.toml", "--calibration", "calibration.toml"]
CLUSTER = ["plan", "run.toml", "--cluster", "small.toml"]


# ---------------------------------------------------------------- this machine


def test_the_list_of_configs_is_ranked() -> None:
    configs = [config(sched__max_staleness=s, rollout__max_running_samples=n)
               for s in (0, 2) for n in (2, 24)]  # fmt: skip
    rows = plan_here(configs, calibration())
    assert {id(row.config) for row in rows} == {id(c) for c in configs}
    speeds = [row.outcome.tokens_per_s for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert (rows[0].max_staleness, rows[0].config.rollout.max_running_samples) == (2, 24)
    for row in rows:
        o = row.outcome
        assert sum(o.busy.values()) + sum(o.idle.values()) == pytest.approx(1.0)
        assert "Evaluate" not in o.busy


def test_seconds_per_step_are_those_of_the_whole_run() -> None:
    """One at a time: 0.1 s a token, then the update; nothing else costs anything."""
    options = config(rollout__max_running_samples=1, sched__max_staleness=0)
    found = calibration()
    work = found.work(options)
    n_tokens = sum(sum(work.group(i).lengths) for i in range(STEPS * 2))
    (row,) = plan_here([options], found)
    prompts = STEPS * 2 * 8
    train_s = STEPS * 0.1 + (n_tokens + prompts) * 1e-4
    rest_s = row.outcome.seconds_per_step * STEPS - n_tokens * 0.1 - train_s
    assert 0 <= rest_s - STEPS * (3 * 0.05 + 0.01) < 0.05  # switches, publishing; rewards


def test_variations_go_around_the_configured_values() -> None:
    found = variations(config(), {})
    values = [(c.sched.max_staleness, c.rollout.max_running_samples,
               c.rollout.quantum_decode_steps) for c in found.configs]  # fmt: skip
    assert values[0] == (1, 8, 8) and len(set(values)) == len(values)
    assert {v[0] for v in values} == {0, 1, 2, 4}
    assert {v[1] for v in values} == {4, 8, 16} and {v[2] for v in values} == {4, 8, 16}
    assert not any(s == 0 and slots == 16 for s, slots, _ in values), "8 samples can be live"
    assert all(c.train == config().train for c in found.configs)


def test_a_variation_that_cannot_be_is_named() -> None:
    found = variations(config(train__updates_per_batch=2), {"sched.max_staleness": [0, 1, 3]})
    assert {c.sched.max_staleness for c in found.configs} == {1, 3}
    (why,) = found.impossible
    assert why.startswith("train.updates_per_batch = 2 is refused")


def test_the_table_says_what_is_configured_and_what_to_paste(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*HERE, "--timeline", "t.json", "--try", "rollout.quantum_decode_steps=8"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert all(line.startswith("simulated |") for line in lines)
    assert sum("as configured" in line for line in lines if " why:" not in line) == 1
    tried = {"rollout.quantum_decode_steps": [8]}
    rows = plan_here(variations(config(), tried).configs, calibration())
    best = choose(rows)
    (pasted,) = (line for line in lines if "| options: " in line)
    words = pasted.partition("options: ")[2].split()
    again = load_config("run.toml", words)
    assert again == best.config
    marked = [line for line in lines if line.startswith("simulated | * ")]
    assert len(marked) == 1 and f"{best.outcome.tokens_per_s:,.1f}" in marked[0]
    marks = [e for e in json.loads(Path("t.json").read_text())["traceEvents"] if e["ph"] == "i"]
    assert len(marks) == config().train.steps


def test_what_is_tried_can_be_given(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tries = ["sched.max_staleness=0,3", "rollout.max_running_samples=8",
             "rollout.quantum_decode_steps=8", "sched.groups_per_step=2"]  # fmt: skip
    assert cli.main([*HERE, *(word for given in tries for word in ("--try", given))]) == 0
    text = capsys.readouterr().out
    assert "3 candidates" in text  # S = 0 and 3, and the configured 1
    assert "--sched.groups_per_step 2" in text and "batch" in text


def test_top_shows_fewer_but_never_hides_the_configured_one(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*HERE, "--top", "1", "--try", "rollout.max_running_samples=2,4"]) == 0
    text = capsys.readouterr().out
    assert "as configured" in text and re.search(r"\d+ more are slower \(--top \d+", text)


@pytest.mark.parametrize(("costs", "helps"), [(PER_STEP, True), (PER_TOKEN, False)])
def test_it_says_whether_asynchrony_helps(costs: Costs, helps: bool) -> None:
    found = variations(config(), {"rollout.quantum_decode_steps": [4]})
    rows = plan_here(found.configs, calibration(costs))
    text = "\n".join(here.conclusion(rows, found.configs[0], found.tried))
    assert ("Asynchrony gains" in text) == helps
    assert ("Asynchrony does not help here" in text) == (not helps)
    assert (choose(rows).max_staleness > 0) == helps


def test_the_same_question_has_the_same_answer() -> None:
    def once() -> list[Here]:
        return plan_here(variations(config(), {}).configs[:6], calibration())

    assert [(row.config, row.outcome) for row in once()] == [(r.config, r.outcome) for r in once()]


def test_checkpoints_count_and_evaluations_do_not() -> None:
    plain, saving, asking = (
        plan_here([config(**c)], calibration())[0].outcome.seconds_per_step
        for c in ({}, {"run__checkpoint_every": 1}, {"run__eval_every": 1})
    )
    assert saving == pytest.approx(plain + (STEPS - 1) / STEPS * Costs().checkpoint_s, rel=0.05)
    assert asking == pytest.approx(plain)


# ---------------------------------------------------------------- a cluster


def test_a_cluster_is_planned_for(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_replica_size()
    assert cli.main([*CLUSTER, "--top", "3", "--timeline", "t.json"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert all(line.startswith("simulated |") for line in lines)
    assert "cluster: eight H100-like cards, 1 x 8 cards of 80 GB" in text
    assert "model: a dense 7.6B decoder" in text and "work: invented" in text
    assert re.search(r"why: .* tokens/s\.", text)
    assert re.search(r"memory of the best, GB a card: generate [\d.]+, train [\d.]+", text)
    assert json.loads(Path("t.json").read_text())["traceEvents"]


def test_work_of_a_cluster_comes_from_a_file_or_from_recorded_runs(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_replica_size(**{"staleness = [0, 1, 2]": "staleness = [1]"})
    assert cli.main([*CLUSTER, "--calibration", "calibration.toml"]) == 0
    assert "work: the groups of the calibration's runs" in capsys.readouterr().out
    Path("work.toml").write_text(
        "seed = 0\ngroup_size = 4\nprompt_tokens = [8, 8]\n"
        'lengths = {kind = "pareto", median_tokens = 9, alpha = 2.0, max_tokens = 60}\n'
    )
    assert cli.main([*CLUSTER, "--workload", "work.toml"]) == 0
    assert "work: the workload file: prompts of 8 tokens" in capsys.readouterr().out


def test_progress_of_a_long_search_goes_to_standard_error(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10_000, 3))
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(seconds))
    assert cli.main([*HERE, "--try", "sched.max_staleness=0"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("simulated 1 of ") and said[-1].split()[1] == said[-1].split()[3]
