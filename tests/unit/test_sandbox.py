"""What code in the sandbox can and cannot do, with the kernel's means and without them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twofold.step.reward import RewardPool
from twofold.step.reward_process import RewardJob
from twofold.tasks import sandbox
from twofold.tasks.rewards import code, code_of
from twofold.tasks.sandbox import Limits, run
from twofold.types import Prompt

GOOD = "def double(x):\n    return 2 * x\n"
TEST = "assert double(2) == 4"
KERNEL = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "interpreter"])


def passes(code, kernel=True, **limits):
    return run(code, [TEST], Limits(**limits), kernel=kernel).n_passed == 1


def has_kernel_means():
    return "weak" not in run(GOOD, [TEST]).containment


# ---------------------------------------------------------------- what counts as passed


@KERNEL
def test_tests_count_one_by_one(kernel):
    tests = [TEST, "assert double(1) == 3", "nonsense(", "assert double('a') == 'aa'"]
    assert run(GOOD, tests, kernel=kernel).n_passed == 2
    assert run("double = None", tests, kernel=kernel).n_passed == 0
    assert run("def double(x:", tests, kernel=kernel).n_passed == 0
    assert run("x = '\ud800'", tests, kernel=kernel).n_passed == 0


@pytest.mark.parametrize(
    "ending",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
        "print('passed\\n' * 10)",
        "import os\nfor fd in range(3, 60):\n  try: os.write(fd, b'passed\\n' * 10000)\n"
        "  except OSError: pass",
    ],
)
def test_ending_early_and_printing_pass_nothing(ending):
    assert run(f"{GOOD}{ending}", ["assert double(2) == 5"], Limits(wall_s=1.0)).n_passed == 0


@KERNEL
def test_the_standard_library_is_there(kernel):
    modules = "collections, itertools, math, re, heapq, random, datetime, decimal, json, zoneinfo"
    assert passes(f"import {modules}\nprint('x' * 100)\n{GOOD}", kernel)


# ---------------------------------------------------------------- limits


@KERNEL
@pytest.mark.parametrize(
    "harm",
    [
        "while True: pass",
        "x = [0] * (1 << 28)",
        "import os\nwhile True: os.fork()",
        "import threading\nwhile True: threading.Thread(target=input).start()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "open('/etc/passwd').read()",
        "open('here', 'w').write('x')",
        "import os; os.kill(os.getppid(), 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (60, 60))",
    ],
)
def test_harm_fails_and_ends(kernel, harm):
    start_s = time.monotonic()
    assert not passes(f"{GOOD}{harm}", kernel, cpu_s=1)
    assert time.monotonic() - start_s < 10


def test_code_that_waits_is_ended():
    start_s = time.monotonic()
    assert not passes(f"{GOOD}import time; time.sleep(100)", wall_s=0.5)
    assert time.monotonic() - start_s < 5


@KERNEL
def test_a_program_may_fail_to_do_harm_and_still_be_right(kernel):
    harm = "try:\n    import os; os.fork()\nexcept OSError:\n    pass\n"
    assert passes(harm + GOOD, kernel)


def test_the_kernel_refuses_what_the_interpreter_cannot_see():
    """Calls past Python: through the C library, with its old handle."""
    if not has_kernel_means():
        pytest.skip("this kernel has no seccomp or no Landlock")
    check = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def refused(*call): return libc.syscall(*call) == -1 and ctypes.get_errno() in (1, 13)\n"
    )
    listing = "try:\n    os.listdir('/')\n    raise SystemExit\nexcept PermissionError: pass"
    calls = {"x86_64": (41, 57, 257), "aarch64": (198, 220, 56)}[os.uname().machine]
    tests = [
        listing,
        f"assert refused({calls[0]}, 2, 1, 0)",  # socket
        f"assert refused({calls[1]}, 17, 0, 0, 0, 0)",  # fork, clone
        f"assert refused({calls[2]}, -100, b'/etc/passwd', 0)",  # openat
        f"assert refused({calls[2]}, -100, b'here', 0o102, 0o600)",
    ]
    if os.uname().machine == "x86_64":
        tests.append(f"assert refused({0x40000000 + 41}, 2, 1, 0)")  # by its x32 number
    assert run(check, tests).n_passed == len(tests)


def test_secrets_in_the_environment_are_not_handed_on(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    assert run("import os", ["assert 'SOME_API_KEY' not in os.environ"]).n_passed == 1


def test_no_descriptor_is_left_behind():
    before = os.listdir("/proc/self/fd")
    for text in (GOOD, "while True: pass", "import os; os._exit(1)"):
        passes(text, wall_s=0.3)
    assert os.listdir("/proc/self/fd") == before


# ---------------------------------------------------------------- the reward


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("So:\n```python\na = 1\n```\nor\n```py\na = 2\n```\n```sh\nls\n```", "a = 2\n"),
        ("```\na = 3\n```", "a = 3\n"),
        ("```python\na = 4", "a = 4"),
        ("```python\n```", ""),
        ("a = 5", "a = 5"),
        ("", ""),
    ],
)
def test_code_of(reply, found):
    assert code_of(reply) == found


def test_code_gives_the_share_of_passed_tests(capfd):
    replies = [f"```python\n{GOOD}```", "no code", f"```\n{GOOD}```", f"```python\n{GOOD}```"]
    tests = [TEST, TEST, [TEST, "assert double(1) == 3"], None]
    chat = [[{"role": "assistant", "content": reply}] for reply in replies]
    assert code(chat, tests) == [1.0, 0.0, 0.5, None]
    assert "code runs in a sandbox: network and processes: " in capfd.readouterr().out
    with pytest.raises(ValueError, match="column 'tests' must be text or a list of texts, not 3"):
        code(chat[:1], [3])


def test_a_killed_worker_takes_the_running_code_along():
    """Code that only waits would stay for ever."""
    prompt = Prompt([{"role": "user", "content": "?"}], {"tests": TEST})
    with RewardPool("code", timeout_s=1.0) as pool:
        pool.check(["tests"])
        pool.submit(0, RewardJob(prompt, ["import time; time.sleep(1000)"], [[1]]))
        worker = pool._workers[0].process.pid
        assert "took longer than 1 s" in pool.poll(10)[0].failures[0]
        end = time.monotonic() + 5
        while group := in_process_group(worker):
            assert time.monotonic() < end, group
            time.sleep(0.02)


def in_process_group(leader):
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            alive.append(path.parent.name)
    return alive


def test_the_sandbox_imports_nothing_of_twofold():
    child = Path(sandbox.__file__).with_name("sandbox_child.py")
    program = f"import runpy, sys; runpy.run_path({str(child)!r}); print('twofold' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n"
