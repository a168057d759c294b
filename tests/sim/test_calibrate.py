"""Costs fitted to records: known ones are found again, other runs are predicted, bad input is
refused in one line. The records come from the simulator, made up to look like those of real runs.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from twofold import cli
from twofold import events as ev
from twofold.config import Config, to_dict, to_toml
from twofold.events import Command, Event
from twofold.obs.record import GroupRow, Record, Row, VersionRow
from twofold.runtime.loop import drive
from twofold.runtime.spec import scheduler_spec
from twofold.sched.scheduler import Scheduler
from twofold.sim import calibrate as cal
from twofold.sim.calibrate import Calibration, calibrate, predict
from twofold.sim.cost import Costs
from twofold.sim.executor import SimExecutor
from twofold.sim.fit import fit, nonnegative
from twofold.sim.observe import observe
from twofold.sim.workload import LogNormal, Synthetic
from twofold.types import Chunk, SampleId

SEED = 4
MACHINE = {"twofold": "0", "torch": "2", "device": "cpu", "cpu": "AVX2", "threads": 2,
           "attention": "cpu kernel"}  # fmt: skip
COSTS = Costs(
    quantum_s=0.021, decode_step_s=0.033, decode_token_s=0.0007, decode_context_s=7e-6,
    prefill_token_s=0.0005, score_s=0.31, score_token_s=0.0002, train_s=0.83, train_token_s=0.003,
    publish_s=0.011, fetch_s=0.0, receive_s=0.0, to_generate_s=0.021, to_train_s=0.034, eval_s=2.5,
    checkpoint_s=0.4, discard_s=0.0013, event_s=0.0004,
)  # fmt: skip


# ---------------------------------------------------------------- records that look real


class WithTokens(SimExecutor):
    """Its rows have what only a real run's have: prompts, tokens in chunks, checksums."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, with_rows=True, **options)
        self._n_told: Counter[SampleId] = Counter()

    def take_rows(self) -> Sequence[Row]:
        made = super().take_rows()
        self._settle()  # nothing crashes here: what is handed over counts
        prompts: list[Row] = []
        others: list[Row] = []
        for row in made:
            if isinstance(row, GroupRow):
                tokens = self.workload.group(row.group_id).prompt_tokens
                prompts.append(row._replace(prompt_ids=[0] * tokens))
            else:
                others.append(row._replace(checksum="abc") if isinstance(row, VersionRow) else row)
        return [*prompts, *self._chunks(), *others]

    def _chunks(self) -> Iterator[Chunk]:
        for unit in self.units:
            since = {id(sample): sample.since for *_, sample in unit.slots._running}
            for group in self.groups.values():
                for sample in group.samples:
                    more = unit.slots.clock - since[id(sample)] if id(sample) in since else 0
                    sample_id = SampleId(group.group_id, sample.index)
                    start = self._n_told[sample_id]
                    n = sample.n_tokens + more - start
                    if n > 0:
                        self._n_told[sample_id] += n
                        assert unit.version is not None
                        yield Chunk(sample_id, start, unit.version, [0] * n, [0.0] * n, [0.0] * n)


class FromVersion0:
    def __init__(self, record: Record) -> None:
        self.record = record

    def commit(
        self, now_s: float, event: Event, commands: Sequence[Command], rows: Sequence[Any]
    ) -> None:
        first = [VersionRow(0, "abc")] if isinstance(event, ev.RunStarted) else []
        self.record.commit(now_s, event, commands, [*first, *rows])


def config(**changes: Any) -> Config:
    made = Config()
    made.rollout.group_size, made.rollout.max_new_tokens = 4, 300
    made.rollout.max_running_samples, made.rollout.quantum_decode_steps = 12, 16
    made.sched.groups_per_step, made.sched.max_staleness = 3, 1
    made.train.steps, made.reward.workers = 12, 16
    for name, value in changes.items():
        section, _, option = name.partition("__")
        setattr(getattr(made, section), option, value)
    return made


def work(**changes: Any) -> Synthetic:
    values: dict[str, Any] = {
        "seed": SEED, "group_size": 4, "lengths": LogNormal(40, 1.0, 300), "correlation": 0.3,
        "prompt_tokens": (8, 200), "pass_rate": (0.0, 0.3, 0.6), "reward_s": 0.01,
    }  # fmt: skip
    return Synthetic(**values | changes)


def real_looking(
    folder: Path,
    options: Config | None = None,
    given: Synthetic | None = None,
    costs: Costs = COSTS,
    stop_after_s: float | None = None,
    **fingerprint: Any,
) -> Path:
    options = options or config()
    meta = {
        "config": to_dict(options),
        "reward": "",
        "data": "",
        "fingerprint": MACHINE | fingerprint,
    }
    spec = scheduler_spec(options)
    executor = WithTokens(given or work(), spec, costs=costs)
    if stop_after_s is not None:
        executor.interrupt(ev.StopRequested(reason="test"), stop_after_s)
    with Record.create(folder, meta) as record:
        drive(Scheduler(spec), executor, FromVersion0(record), ev.RunStarted())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_looking(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def fitted(run: Path) -> Calibration:
    return calibrate([run])


# ---------------------------------------------------------------- what is found


def test_known_costs_are_found_again(tmp_path: Path) -> None:
    dropping = work(bad_group=0.15, reward_s=1e-4)  # drops, and bursts of rewards
    options = config(train__kl_coef=0.1)  # so that batches are scored, and all groups trained
    found = calibrate([real_looking(tmp_path / "run", options, replace(dropping, trains_all=True))])
    for name, value in vars(COSTS).items():
        assert vars(found.costs)[name] == pytest.approx(value, rel=1e-3), (name, SEED)
    assert max(found.errors.values()) < 1e-4
    assert found.notes == ("fetch_s: did not occur, taken as 0",
                           "receive_s: did not occur, taken as 0")  # fmt: skip


def test_every_quantum_is_rebuilt_also_after_pauses(run: Path) -> None:
    seen = observe(run)
    assert seen.n_lost == 0 and len(seen.quanta) > 30
    for quantum in seen.quanta:
        assert COSTS.quantum(*quantum[:4]) == pytest.approx(quantum.seconds, rel=1e-9)
    with Record.open(run, read_only=True) as record:
        versions = "SELECT count(DISTINCT version) FROM chunks GROUP BY group_id, idx"
        n_paused = sum(n > 1 for (n,) in record.query(versions))
    assert n_paused > 5, "no sample went on after an update: this shows nothing"


def test_groups_without_variance_cost_no_training(run: Path, fitted: Calibration) -> None:
    seen = observe(run)
    assert {work.trains for work in seen.groups} == {True, False}
    costs = fitted.costs
    assert costs.train_s == pytest.approx(COSTS.train_s, rel=1e-3)
    assert costs.train_token_s == pytest.approx(COSTS.train_token_s, rel=1e-3)


def test_the_groups_of_the_run_are_its_work(run: Path) -> None:
    seen = observe(run).groups
    for group_id, group in enumerate(seen):
        original = work().group(group_id)
        assert group.lengths == original.lengths and group.prompt_tokens == original.prompt_tokens
        assert group.reward_s == pytest.approx(original.reward_s, abs=1e-9)
        assert group.pass_rate == pytest.approx(original.pass_rate)
        assert (group.varies, group.n_valid) == (original.varies, original.n_valid)


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_another_staleness_is_predicted(
    fitted: Calibration, tmp_path: Path, max_staleness: int
) -> None:
    held_out = real_looking(tmp_path / "other", config(sched__max_staleness=max_staleness))
    (found,) = predict(fitted, [held_out])
    for simulated in (found.predicted, found.own_groups):
        assert simulated.n_steps == found.real.n_steps == 12
        assert simulated.step_s == pytest.approx(found.real.step_s, rel=0.01), SEED
        assert simulated.tokens_per_s == pytest.approx(found.real.tokens_per_s, rel=0.01), SEED
        assert simulated.staleness == pytest.approx(found.real.staleness, abs=0.01), SEED
    assert (found.real.staleness == 0) == (max_staleness == 0)


def test_several_updates_of_a_batch_are_predicted(fitted: Calibration, tmp_path: Path) -> None:
    options = config(sched__max_staleness=3, sched__groups_per_step=4, train__updates_per_batch=2)
    held_out = real_looking(tmp_path / "other", options)
    (found,) = predict(fitted, [held_out])
    assert found.own_groups.staleness == pytest.approx(found.real.staleness, abs=0.01) and (
        found.real.staleness > 1
    )


def test_runs_are_merged_by_how_far_each_was(run: Path, tmp_path: Path) -> None:
    other = real_looking(tmp_path / "other", config(train__steps=6), work(seed=SEED + 1))
    merged = calibrate([run, other]).groups
    first, second = observe(run).groups, observe(other).groups
    assert len(merged) == len(first) + len(second)
    half = merged[: len(merged) // 2]
    assert abs(sum(g in second for g in half) - len(second) / 2) <= 1


def test_quanta_that_do_not_add_up_are_left_out_and_told(tmp_path: Path) -> None:
    folder = real_looking(tmp_path / "run")
    n_quanta = len(observe(folder).quanta)
    with sqlite3.connect(folder / "record.sqlite") as db:  # as if preempted: it got less, for once,
        # and its last token a quantum later
        (gid, idx, start, ids), (later, more) = next(
            (row, following)
            for row in db.execute(
                "SELECT group_id, idx, start, token_ids FROM chunks WHERE version = 6 AND start > 0"
                " AND length(token_ids) > 4 ORDER BY 1, 2, 3"
            ).fetchall()
            for following in db.execute(
                "SELECT start, token_ids FROM chunks WHERE group_id = ? AND idx = ? AND start = ?"
                " AND version = 6",
                (row[0], row[1], row[2] + len(row[3]) // 4),
            )
        )
        update = (
            "UPDATE chunks SET start = ?, token_ids = ? WHERE (group_id, idx, start) = (?, ?, ?)"
        )
        db.execute(update, (start, ids[:-4], gid, idx, start))
        db.execute(update, (later - 1, ids[-4:] + more, gid, idx, later))
    seen, found = observe(folder), calibrate([folder])
    assert 0 < seen.n_lost < n_quanta / 4, "only those under version 6"
    assert len(seen.quanta) + seen.n_lost == n_quanta
    assert any(f"who ran in {seen.n_lost} of {n_quanta} quanta" in note for note in found.notes)
    for quantum in seen.quanta:
        assert COSTS.quantum(*quantum[:4]) == pytest.approx(quantum.seconds, rel=1e-9)


def test_the_wait_for_a_reward_process_belongs_to_the_latency(tmp_path: Path) -> None:
    """16 processes made this record; had it been one, groups would have waited for each other."""
    options = config(reward__workers=1, sched__max_staleness=0)
    slow = work(reward_s=2.0)
    groups = observe(real_looking(tmp_path / "run", options, slow)).groups
    latencies = sum(group.reward_s for group in groups)
    judging = sum(slow.group(g).reward_s for g in range(len(groups)))
    assert latencies > 1.1 * judging


def test_a_run_that_still_goes_on_is_read_up_to_now(tmp_path: Path) -> None:
    options = config()
    with Record.create(
        tmp_path / "run", {"config": to_dict(options), "fingerprint": MACHINE}
    ) as record:
        spec = scheduler_spec(options)
        executor = WithTokens(work(), spec, costs=COSTS)
        recorder = FromVersion0(record)
        executor.interrupt(ev.StopRequested(reason="test"), 30.0)
        drive(Scheduler(spec), executor, recorder, ev.RunStarted())
        seen = observe(tmp_path / "run")  # the writer has it open
    assert 0 < seen.measured.n_steps < 12 and seen.n_lost == 0
    assert calibrate([tmp_path / "run" / "record.sqlite"]).runs == (str(tmp_path / "run"),)


# ---------------------------------------------------------------- the fit


def quanta(n: int) -> tuple[list[tuple[float, ...]], list[float]]:
    random = Random(SEED)
    rows = [(random.uniform(1, 16), random.uniform(1, 900), random.uniform(0, 400), 1.0)
            for _ in range(n)]  # fmt: skip
    return rows, [0.1 * a + 0.003 * b + 0.002 * c + 0.05 for a, b, c, _ in rows]


def test_a_third_of_stalled_quanta_does_not_move_the_fit() -> None:
    rows, seconds = quanta(60)
    random = Random(SEED)
    noisy = [s * (random.uniform(2, 20) if i % 3 == 0 else random.uniform(0.99, 1.01))
             for i, s in enumerate(seconds)]  # fmt: skip
    found = fit(rows, noisy)
    assert found.coefficients[:3] == pytest.approx((0.1, 0.003, 0.002), rel=0.05), SEED


def test_a_cost_that_is_not_there_is_0_never_less() -> None:
    rows, _ = quanta(40)
    random = Random(SEED)
    for _ in range(20):
        seconds = [0.1 * row[0] * random.uniform(0.9, 1.1) for row in rows]
        assert min(fit(rows, seconds).coefficients) >= 0, SEED


def test_columns_that_say_the_same_are_told_and_the_first_is_kept() -> None:
    rows, seconds = quanta(30)
    twice = [(*row, 3 * row[1], 0.0) for row in rows]
    found = fit(twice, seconds)
    assert found.inseparable == (4,)  # not the last: that never occurred
    assert found.coefficients[1] == pytest.approx(0.003) and found.coefficients[4:] == (0.0, 0.0)
    constant = fit([(16.0, 1.0)] * 9, [1.6] * 9)
    assert constant.inseparable == (1,) and constant.coefficients == pytest.approx((0.1, 0.0))


def test_nonnegative_least_squares_meets_its_conditions() -> None:
    """Karush, Kuhn, Tucker: the gradient is 0 where a coefficient is above 0, else not negative."""
    random = Random(SEED)
    for _ in range(50):
        rows = [[random.gauss() for _ in range(4)] for _ in range(12)]
        values = [random.gauss() for _ in range(12)]
        found = nonnegative(rows, values, [1.0] * 12)
        rests = [sum(a * x for a, x in zip(row, found, strict=True)) - y
                 for row, y in zip(rows, values, strict=True)]  # fmt: skip
        for i, x in enumerate(found):
            slope = sum(row[i] * rest for row, rest in zip(rows, rests, strict=True))
            assert x >= 0 and slope >= -1e-9 and (x == 0 or abs(slope) < 1e-9), SEED


# ---------------------------------------------------------------- file, report, commands


def test_a_file_gives_the_calibration_back(fitted: Calibration, tmp_path: Path) -> None:
    found = replace(fitted, notes=('quotes " and \\ and [machine]',))
    cal.save(found, tmp_path / "calibration.toml")
    assert cal.load(tmp_path / "calibration.toml") == found
    lines = (tmp_path / "calibration.toml").read_text().splitlines()
    assert sum(line.startswith("    {prompt_tokens = ") for line in lines) == len(found.groups)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("format = 1", "format = 2", "format = 2, this Twofold reads 1"),
        ("decode_step_s = ", "decode_step_s = -", "costs.decode_step_s = -"),
        ("decode_step_s = ", "decode_stop_s = ", "decode_stop_s"),
        ("[costs]", "[cost]", "'costs' is missing"),
        ("format = 1", "format = ", "Invalid value"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    fitted: Calibration, tmp_path: Path, before: str, after: str, message: str
) -> None:
    path = tmp_path / "calibration.toml"
    cal.save(fitted, path)
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ValueError, match=message) as refused:
        cal.load(path)
    assert "calibration.toml" in str(refused.value) and "\n" not in str(refused.value)


def test_the_report_has_every_cost_and_every_held_out_run(
    fitted: Calibration, tmp_path: Path
) -> None:
    held_out = real_looking(tmp_path / "held-out", config(sched__max_staleness=2))
    found = fitted
    text = cal.report(found, predict(found, [held_out]))
    assert all(name in text for name in vars(COSTS))
    assert "note: fetch_s: did not occur" in text
    lines = text.splitlines()
    shown = lines[lines.index(str(held_out)) + 1]
    real = observe(held_out).measured
    assert shown.startswith("  seconds per step, mean") and f"{real.step_s:.4g}" in shown
    assert lines[-3].split()[:2] == ["median", "error,"]


def test_the_commands_calibrate_and_simulate(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, options = tmp_path / "c.toml", tmp_path / "simulated", tmp_path / "run.toml"
    options.write_text(to_toml(config()))
    assert cli.main(["calibrate", str(run), "--out", str(file)]) == 0
    simulate = ["sim", str(options), "--calibration", str(file), "--out", str(out)]
    assert cli.main(simulate) == 0
    text = capsys.readouterr().out
    real = observe(run).measured
    assert f"done: 12 steps, {real.step_s:.3g} s a step" in text
    assert cli.main(simulate) == 2
    assert "already holds a run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is a simulated run"):
        observe(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate", "nothing"], "nothing holds no run"),
        (["sim", "nothing.toml"], "cannot read nothing.toml"),
        (["sim", "run.toml", "--calibration", "nothing.toml"], "cannot read nothing.toml"),
        (["sim", "run.toml", "--workload", "run.toml"], "run.toml: lengths = None"),
        (["sim", "run.toml", "--sched.max_stalenes", "3"], "did you mean sched.max_staleness"),
    ],
)
def test_bad_input_ends_a_command_with_2_and_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(to_toml(config()))
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# ---------------------------------------------------------------- what is refused


def refused(*paths: Path) -> str:
    with pytest.raises(ValueError) as error:
        calibrate(paths)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_to_calibrate_from(tmp_path: Path) -> None:
    assert "name one run folder" in refused()
    assert "holds no run" in refused(tmp_path / "none")


def test_a_run_without_a_finished_step(tmp_path: Path) -> None:
    folder = real_looking(tmp_path / "run", stop_after_s=0.01)
    assert refused(folder) == f"{folder} has no finished step: let the run go on, or leave it out"


@pytest.mark.parametrize(("name", "value"), [("threads", 4), ("cpu", "AVX512"), ("device", "cuda")])
def test_runs_of_two_machines(
    run: Path, fitted: Calibration, tmp_path: Path, name: str, value: object
) -> None:
    other = real_looking(tmp_path / "other", **{name: value})
    assert f"{other}: {name} is {value}, of {run} it is {MACHINE[name]}" in refused(run, other)
    with pytest.raises(ValueError, match=f"{name} is {value}, of the calibration it is"):
        predict(fitted, [other])


def test_runs_of_two_models(run: Path, tmp_path: Path) -> None:
    other = real_looking(tmp_path / "other", config(model__name="another"))
    assert "model is another" in refused(run, other)


def test_a_run_cannot_be_held_out_of_what_it_was_fitted_to(run: Path, fitted: Calibration) -> None:
    with pytest.raises(ValueError, match="cannot be held out"):
        predict(fitted, [run])


def test_groups_of_another_size(fitted: Calibration) -> None:
    with pytest.raises(ValueError, match=r"rollout.group_size = 8, but the recorded groups have 4"):
        fitted.work(config(rollout__group_size=8))


@pytest.mark.parametrize("where", [0.0, 0.02, 0.5])
def test_a_damaged_record(run: Path, tmp_path: Path, where: float) -> None:
    body = bytearray((run / "record.sqlite").read_bytes())
    start = int(where * len(body))
    body[start : start + 40_000] = bytes(range(256)) * 157
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.sqlite").write_bytes(body)
    assert str(tmp_path / "run") in refused(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM meta WHERE key = 'fingerprint'",
        "DELETE FROM meta WHERE key = 'config'",
        "UPDATE events SET body = '{}' WHERE n = 5",
        "DELETE FROM events WHERE n = 9",
        "DELETE FROM commands WHERE seq = 3",
        "UPDATE samples SET n_tokens = NULL",
        "DELETE FROM samples WHERE group_id = 2",
        "DELETE FROM groups WHERE group_id = 2",
    ],
)
def test_a_record_with_a_hole(run: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "record.sqlite"
    path.write_bytes((run / "record.sqlite").read_bytes())
    with sqlite3.connect(path) as db:
        db.execute(change)
    assert str(tmp_path / "run") in refused(tmp_path / "run")


def test_a_calibration_is_plain_data() -> None:
    assert Calibration(Costs(), (), {}, ()) == Calibration(Costs(), (), {}, ())
