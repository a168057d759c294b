"""Reward pool: what a reward may do wrong, and that nothing of it outlives the call."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

import twofold
from twofold.step.reward import RewardPool
from twofold.step.reward_process import RewardJob, call_arguments
from twofold.types import Prompt

CHAT = Prompt([{"role": "user", "content": "What is 2 + 3?"}], {"answer": "5", "level": 1})

# one file with everything a reward can do; the completions say what is wanted
OWN = """
import os, subprocess, sys, time
import json

class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def reward(prompts, completions, completion_ids=None, **columns):
    text = completions[0][-1]["content"]
    n = len(completions)
    if text == "hang":
        while True: pass
    if text == "raise":
        raise KeyError("no such answer")
    if text == "exit":
        sys.exit(2)
    if text == "die":
        os._exit(3)
    if text == "unreadable":
        raise Unreadable
    if text == "half":
        raise KeyError("\\ud800")
    if text == "closed":
        os.closerange(0, 256)
        time.sleep(0.1)
        os._exit(7)
    if text == "closed and on":
        os.closerange(0, 256)
    if text == "signal":
        os.kill(os.getpid(), 40)
    if text.startswith("once "):
        file = text[5:]
        first = not os.path.exists(file)
        open(file, "a").write(f"{os.getpid()}\\n")
        if first:
            time.sleep(60)
    if text == "none":
        return [None, 1.0]
    if text == "nan":
        return [float("nan"), float("-inf")]
    if text == "text":
        return ["1.0", [1.0]]
    if text == "short":
        return [1.0] * (n - 1)
    if text == "scalar":
        return 1.0
    if text.startswith("fork "):
        for _ in range(2):
            child = os.fork() or time.sleep(60) or os._exit(0)
            open(text[5:], "a").write(f"{child}\\n")
        time.sleep(60)
    if text.startswith("orphan "):
        child = os.fork() or time.sleep(60) or os._exit(0)
        open(text[7:], "a").write(f"{child}\\n")
        os._exit(4)
    if text == "print":
        for _ in range(40):
            print("x" * (1 << 16))
        os.write(2, b"y" * (1 << 20))
    if text.startswith("sleep "):
        time.sleep(float(text[6:]))
    if text == "pid":
        return [os.getpid()] * n
    if text == "modules":
        return [float(m in sys.modules) for m in ("torch", "numpy", "sympy", "cloudpickle")]
    if text == "interrupted":
        os.kill(os.getpid(), 2)
    return [len(c[-1]["content"]) for c in completions]
"""


def job(*completions: str, prompt: Prompt = CHAT) -> RewardJob:
    return RewardJob(prompt, list(completions), [[1, 2]] * len(completions))


def collect(pool: RewardPool, n: int, limit_s: float = 10.0) -> dict[int, object]:
    results, end = {}, time.monotonic() + limit_s
    while len(results) < n:
        left = end - time.monotonic()
        assert left > 0, f"{len(results)} of {n} results after {limit_s} s"
        for result in pool.poll(left):
            assert result.ticket not in results, "a job has two results"
            results[result.ticket] = result
    return results


def alive(pid: int) -> bool:
    """Running; a zombie that nobody waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(*pids: int) -> None:
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, f"still there: {[p for p in pids if alive(p)]}"
        time.sleep(0.01)


def pids_in(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split() if int(line)]


def group_members(pgid: int) -> list[int]:
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append((int(path.parent.name), path.read_text().rpartition(")")[2].split()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [pid for pid, stat in stats if int(stat[2]) == pgid and stat[0] != "Z"]


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "own.py:reward"


@pytest.fixture
def pool(own):
    with RewardPool(own, workers=1, timeout_s=0.5) as pool:
        pool.check(["answer", "level"])
        yield pool


def died_twice(how: str) -> str:
    return f"reward worker died ({how}), and on the second try: reward worker died ({how})"


def test_bad_calls_fail_their_group_alone(pool):
    expected = {
        "ok": ([2.0, 1.0], [None, None]),
        "raise": "KeyError: 'no such answer' (own.py:15)",
        "exit": "SystemExit: 2 (own.py:17)",
        "die": died_twice("exit code 3"),
        "hang": "reward killed: it took longer than 0.5 s (reward.timeout_s)",
        "short": ([None, None], ["reward returned 1 values for 2 completions"] * 2),
        "scalar": ([None, None], ["reward returned float instead of a list of 2 numbers"] * 2),
        "none": ([None, 1.0], ["reward returned None", None]),
        "nan": ([None, None], ["reward returned nan", "reward returned -inf"]),
        "text": (
            [None, None],
            [
                "reward returned text '1.0' instead of a number",
                "reward returned list instead of a number",
            ],
        ),
        "interrupted": ([11.0, 1.0], [None, None]),
        "unreadable": "Unreadable (own.py:21)",
        "half": r"KeyError: '\ud800' (own.py:23)",
        "ok again": ([8.0, 1.0], [None, None]),
    }
    for ticket, what in enumerate(expected):
        pool.submit(ticket, job(what, "x"))
    results = collect(pool, len(expected))
    for ticket, (what, outcome) in enumerate(expected.items()):
        if isinstance(outcome, str):  # its sibling is judged by itself
            outcome = ([None, 1.0], [outcome, None])
        assert (results[ticket].rewards, results[ticket].failures) == outcome, what
    assert 1.0 <= results[4].seconds < 3.0  # with its group, and alone


def test_siblings_of_completions_that_kill_are_judged_to_a_limit(own):
    """Three completions may each take the time limit; then the group must not go on like that."""
    with RewardPool(own, workers=1, timeout_s=0.4) as pool:
        pool.check()
        pool.submit(0, job("hang", "a", "hang", "bc"))
        pool.submit(1, job("hang", "hang", "hang", "never tried"))
        pool.submit(2, job("ok"))
        results = collect(pool, 3)
        assert results[0].rewards == [None, 1.0, None, 2.0]
        assert list(results) == [0, 1, 2], "one by one comes before what was submitted later"
        assert results[1].rewards == [None] * 4
        assert "took longer than 0.4 s" in results[1].failures[2]
        assert results[1].failures[3].startswith("not tried: 3 others of its group")
        assert results[2].rewards == [2.0]


def test_a_hung_call_does_not_hold_up_the_others(own):
    with RewardPool(own, workers=2, timeout_s=1.5) as pool:
        pool.check()
        pool.submit(0, job("hang"))
        for ticket in range(1, 6):
            pool.submit(ticket, job("fine"))
        results = collect(pool, 6)
        assert list(results)[-1] == 0, "the others went on meanwhile"
        assert [results[t].rewards for t in range(6)] == [[None]] + [[4.0]] * 5


def test_results_do_not_depend_on_the_number_of_workers_or_the_order(own):
    texts = [f"sleep 0.0{i}" + "0" * (i % 3) for i in range(1, 8)]

    def outcome(workers: int, order: list[int]) -> dict[int, list[float]]:
        with RewardPool(own, workers=workers, timeout_s=5) as pool:
            for ticket in order:
                pool.submit(ticket, job(texts[ticket], "y"))
            return {t: r.rewards for t, r in collect(pool, len(order)).items()}

    forwards = outcome(1, list(range(7)))
    assert forwards == outcome(3, list(reversed(range(7))))
    assert forwards[2] == [float(len(texts[2])), 1.0]


def test_a_worker_is_reused(pool):
    for ticket in range(3):
        pool.submit(ticket, job("pid"))
    assert len({r.rewards[0] for r in collect(pool, 3).values()}) == 1


def test_children_of_a_killed_reward_die_too(pool, tmp_path):
    pool.submit(0, job(f"fork {tmp_path / 'pids'}"))
    assert "killed" in collect(pool, 1)[0].failures[0]
    children = pids_in(tmp_path / "pids")
    assert len(children) == 2
    until_gone(*children)


def test_a_child_that_outlives_its_worker_is_noticed_and_dies(pool, tmp_path):
    pool.submit(0, job(f"orphan {tmp_path / 'pid'}"))
    # noticed by its end, not by the time limit
    assert collect(pool, 1)[0].failures == [died_twice("exit code 4")]
    until_gone(*pids_in(tmp_path / "pid"))


def test_a_call_whose_worker_is_killed_from_outside_is_made_once_more(own, tmp_path):
    with RewardPool(own, timeout_s=60) as pool:
        pool.submit(0, job(f"once {tmp_path / 'pids'}"))
        pool.submit(1, job("next"))
        end = time.monotonic() + 10
        while not (tmp_path / "pids").exists() or not pids_in(tmp_path / "pids"):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(pids_in(tmp_path / "pids")[0], signal.SIGKILL)
        results = collect(pool, 2)
        assert list(results) == [0, 1], "before what was submitted later"
        assert results[0].failures == results[1].failures == [None]
        first, second = pids_in(tmp_path / "pids")
        assert first != second


def test_a_time_out_is_final(pool, tmp_path):
    pool.submit(0, job(f"once {tmp_path / 'pids'}"))
    assert "took longer than 0.5 s" in collect(pool, 1)[0].failures[0]
    assert len(pids_in(tmp_path / "pids")) == 1


def test_a_worker_that_is_killed_while_it_starts_costs_no_group(own, tmp_path):
    """The first replacement dies while it imports; the second judges."""
    (tmp_path / "late.py").write_text(
        textwrap.dedent("""
        import os
        with open("starts", "ab") as file:
            file.write(b"x")
        if os.path.getsize("starts") == 2:
            os.kill(os.getpid(), 9)

        def reward(completions, **columns):
            if os.path.getsize("starts") == 1 and completions[0][-1]["content"] == "hang":
                while True: pass
            return [1.0] * len(completions)
        """)
    )
    with RewardPool("late.py:reward", timeout_s=0.5) as pool:
        pool.check()
        pool.submit(0, job("hang"))
        pool.submit(1, job("fine"))
        results = collect(pool, 2)
        assert "took longer" in results[0].failures[0]
        assert results[1].rewards == [1.0]
    assert (tmp_path / "starts").read_text() == "xxx"


@pytest.mark.parametrize(
    ("what", "how"),
    [("closed", "exit code 7"), ("closed and on", "exit code 1"), ("signal", "signal 40")],
)
def test_a_death_is_told_as_it_was_and_not_as_the_kill_that_follows(own, what, how):
    with RewardPool(own, timeout_s=10) as pool:
        pool.submit(0, job(what))
        assert collect(pool, 1)[0].failures[0].startswith(f"reward worker died ({how}")


def test_close_leaves_no_process_even_while_calls_run(own, tmp_path):
    pool = RewardPool(own, workers=2, timeout_s=60)
    pool.check()
    pool.submit(0, job("pid"))
    pool.submit(1, job("pid"))
    leaders = {int(r.rewards[0]) for r in collect(pool, 2).values()}
    members = [pid for leader in leaders for pid in group_members(leader)]
    assert len(members) == 2 * len(leaders)  # each with its watchdog
    pool.submit(2, job(f"fork {tmp_path / 'pids'}"))
    pool.submit(3, job("hang"))
    pool.submit(4, job("never judged"))
    end = time.monotonic() + 5
    while not (tmp_path / "pids").exists() or len(pids_in(tmp_path / "pids")) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    pool.close()
    pool.close()
    assert not any(thread.name == "rewards" for thread in __import__("threading").enumerate())
    until_gone(*members, *pids_in(tmp_path / "pids"))


def test_processes_die_with_a_killed_parent(own, tmp_path):
    paths = [str(Path(__file__).parent), str(Path(twofold.__file__).parents[1])]
    program = f"""
        import sys, time
        sys.path[:0] = {paths}
        from twofold.step.reward import RewardPool
        from test_reward import job
        pool = RewardPool("own.py:reward", workers=2, timeout_s=60)
        pool.check()
        pool.submit(0, job("pid"))
        print(int(pool.poll(None)[0].rewards[0]), flush=True)
        pool.submit(1, job("fork {tmp_path / "pids"}"))
        pool.submit(2, job("hang"))
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        end = time.monotonic() + 5
        while not (tmp_path / "pids").exists() or len(pids_in(tmp_path / "pids")) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL)
    until_gone(worker, *pids_in(tmp_path / "pids"), *group_members(worker))


def test_prints_go_to_a_bounded_log(own, tmp_path, capfd):
    log = tmp_path / "reward.log"
    with RewardPool(own, timeout_s=5, log_path=log) as pool:
        pool.submit(0, job("raise"))
        pool.submit(1, job("print"))
        assert collect(pool, 2)[1].rewards == [5.0]
    text = log.read_text()
    assert "Traceback" in text and "KeyError: 'no such answer'" in text
    assert "xxxx" in text and len(text) == 1 << 20
    with RewardPool(own, timeout_s=5) as pool:  # and without a log nowhere
        pool.submit(0, job("print"))
        assert collect(pool, 1)[0].rewards == [5.0]
    assert capfd.readouterr() == ("", "")


def test_the_log_is_made_when_there_is_something_to_write(own, tmp_path):
    log = tmp_path / "run" / "reward.log"
    with RewardPool(own, timeout_s=5, log_path=log) as pool:
        pool.submit(0, job("quiet"))
        collect(pool, 1)
        assert not log.parent.exists()
        pool.submit(0, job("raise"))
        collect(pool, 1)
        end = time.monotonic() + 5
        while not log.exists() or "KeyError" not in log.read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
    with RewardPool(own, timeout_s=5, log_path=tmp_path / "no" / "run" / "reward.log") as pool:
        pool.submit(0, job("print"))  # more than a pipe holds: somebody reads it
        assert collect(pool, 1)[0].rewards == [5.0]
        assert not (tmp_path / "no").exists()


def test_wait_wakes_for_results_and_times_out(pool):
    assert pool.poll() == []
    start = time.monotonic()
    assert pool.poll(0.05) == []
    assert time.monotonic() - start >= 0.05
    assert wait([pool.fileno()], 0) == []
    pool.submit(0, job("sleep 0.05"))
    pool.submit(1, job("ok"))
    assert wait([pool.fileno()], 5) == [pool.fileno()]
    assert {r.ticket for r in pool.poll() + pool.poll(5)} == {0, 1}
    assert wait([pool.fileno()], 0) == []


def test_workers_import_little_so_that_a_replacement_starts_quickly(pool):
    pool.submit(0, job("modules", "", "", ""))
    assert collect(pool, 1)[0].rewards == [0.0] * 4


def test_built_in_rewards_run_in_workers():
    with RewardPool("last_number") as pool:
        pool.check(["answer"])
        pool.submit(0, job("It is 5.", "6"))
        assert collect(pool, 1)[0].rewards == [1.0, 0.0]
    with RewardPool("math_verify") as pool:  # needs the main thread
        pool.submit(0, job("$\\frac{10}{2}$", "\\boxed{6}"))
        assert collect(pool, 1)[0].rewards == [1.0, 0.0]


def test_workers_are_not_bound_to_the_training_threads_core(monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    everywhere = os.sched_getaffinity(0)
    monkeypatch.setattr("twofold.step.reward.usable_cpus", lambda: everywhere)
    reward = lambda completions, **columns: [  # noqa: E731
        len(os.sched_getaffinity(0)),
        os.environ["OMP_NUM_THREADS"] == "1" and "OMP_PROC_BIND" not in os.environ,
    ]
    os.sched_setaffinity(0, {min(everywhere)})  # as OpenMP binds a training process
    try:
        with RewardPool(reward) as pool:
            pool.submit(0, job("a", "b"))
            assert collect(pool, 1)[0].rewards == [len(everywhere), 1.0]
    finally:
        os.sched_setaffinity(0, everywhere)


def test_lambdas_and_closures_are_sent(own):
    scale = 3
    with RewardPool(lambda completions, **columns: [scale] * len(completions)) as pool:
        pool.check(["answer"])
        pool.submit(0, job("a", "b"))
        assert collect(pool, 1)[0].rewards == [3.0, 3.0]
    lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match=r"reward\.function: .* cannot be sent to a worker"):
        RewardPool(lambda completions, **columns: [lock])


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        ("last_numbr", "no reward 'last_numbr'; did you mean 'last_number'?"),
        ("own.py:rewards", "own.py has no function 'rewards'; did you mean 'reward'?"),
        ("none.py:reward", "no file none.py"),
        ("no_such_module:reward", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken.py:reward", "ZeroDivisionError: division by zero (broken.py:2)"),
    ],
)
def test_check_says_in_one_line_what_is_wrong(own, reward, line):
    Path("broken.py").write_text("import os\n1 / 0\n")
    with RewardPool(reward, workers=2) as pool:
        with pytest.raises(ValueError) as caught:
            pool.check(["answer"])
        assert str(caught.value).startswith(f"reward.function: {line}")
        # a job that nobody can judge fails rather than waits
        pool.submit(0, job("a", "b"))
        assert collect(pool, 1)[0].failures[0].startswith(line)


def test_check_compares_the_signature_with_the_columns(own):
    with RewardPool("last_number") as pool:
        pool.check(["answer"])
        with pytest.raises(ValueError, match="needs answer, but a reward is called with comp"):
            pool.check(["result"])
    with RewardPool(lambda prompts, completions, completion_ids: []) as pool:
        pool.check([])
        with pytest.raises(ValueError, match=r"does not take answer; add \*\*columns"):
            pool.check(["answer"])


def test_several_functions_by_name_and_by_value(own):
    """A reward is the weighted sum; the parts are told apart by name."""

    def length(completions, **columns):
        return [float(len(c[-1]["content"])) for c in completions]

    rewards = ["last_number", "own.py:reward", length, length]
    with RewardPool(rewards, weights=[10, 1, 0.5, 0], timeout_s=5) as pool:
        pool.check(["answer", "level"])
        assert pool.names == ["last_number", "reward", "length", "length_2"]
        pool.submit(0, job("= 5", "none"))
        pool.submit(1, job("raise", "5"))
        results = collect(pool, 2)
        assert results[0].rewards == [14.5, 6.0]
        assert results[0].parts == {
            "last_number": [1.0, 0.0], "reward": [3.0, 4.0],
            "length": [3.0, 4.0], "length_2": [3.0, 4.0],
        }  # fmt: skip
        assert results[1].rewards == [None, 11.5], "one that raised spoils its completion alone"
        assert results[1].parts["last_number"] == [None, 1.0]
        with pytest.raises(ValueError, match=r"reward\.functions: last_number needs answer, but"):
            pool.check(["level"])
    with pytest.raises(ValueError, match=r"reward\.weights: 2 weights for 1 functions; give one"):
        RewardPool("last_number", weights=[1, 2])


def test_a_function_of_a_module_in_the_working_directory(own):
    with RewardPool("own:reward") as pool:
        pool.submit(0, job("four"))
        assert collect(pool, 1)[0].rewards == [4.0]


def test_arguments_are_those_of_trl():
    chat = call_arguments(RewardJob(CHAT, ["5", "six"], [[20, 2], [30, 31, 2]]))
    assert chat == {
        "prompts": [CHAT.content, CHAT.content],
        "completions": [
            [{"role": "assistant", "content": "5"}],
            [{"role": "assistant", "content": "six"}],
        ],
        "completion_ids": [[20, 2], [30, 31, 2]],
        "answer": ["5", "5"],
        "level": [1, 1],
    }
    text = call_arguments(RewardJob(Prompt("2 + 3 ="), ["5"], [[20]]))
    assert text == {"prompts": ["2 + 3 ="], "completions": ["5"], "completion_ids": [[20]]}


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"reward\.workers: 0"):
        RewardPool("last_number", workers=0)
    with pytest.raises(ValueError, match=r"reward\.timeout_s: 0"):
        RewardPool("last_number", timeout_s=0)
