# ruff: noqa: E402  threads are bound before torch is loaded
"""How fast is a training step's forward and backward? Against transformers and the matmul limit.

    python bench/train_step.py [--rounds 5] [--tokens 2048]

SmolLM2-135M-Instruct in bfloat16 (float32 on a CPU without instructions for it), one pack of 2,048
tokens as 8 sequences of 256 (one token of prompt, the rest completion, so both sides compute the
same log-probs), loss and backward of all weights, no optimizer. Theirs is the plain transformers
model in the same dtype with the usual log-softmax over its logits, eager and compiled; the better
one counts. The sides take turns in one process. The limit is the time of each linear layer's and
the head's flops, forward and backward, at the GEMM rate measured for its shape and dtype in the
same run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from twofold.threads import bind_threads

print(bind_threads(0))

import torch
import torch.nn.functional as F
from machine import describe, dtypes
from transformers import AutoModelForCausalLM

from twofold.model.resolve import resolve
from twofold.model.transformer import Transformer
from twofold.model.weights import load_model
from twofold.step.logprob import chunked_logprobs
from twofold.step.pack import Part, build_pack
from twofold.types import Sample, SampleId

SEQUENCE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled side out")
    a = parser.parse_args()
    folder, chosen = resolve("smollm2-135m-instruct")
    print(chosen)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 49_000, (a.tokens // SEQUENCE, SEQUENCE), generator=generator)
    dtype = getattr(torch, dtypes()[0])
    model = load_model(folder, dtype)
    sides = {"ours": our_side(model, ids)}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    sides["transformers eager"] = their_side(theirs, ids)
    if not a.no_compile:
        sides["transformers compiled"] = their_side(torch.compile(theirs), ids)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()  # warm-up: kernels, compilation, allocation
    for _ in range(a.rounds):
        for name, side in sides.items():
            start_s = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start_s)
    limit_s = limit(model, a.tokens)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    best = min((name for name in medians if name != "ours"), key=lambda name: medians[name])
    print(f"{'side':22} {'median s':>9} {'tokens/s':>9} {'share of limit':>15}")
    for name, seconds in medians.items():
        print(f"{name:22} {seconds:9.2f} {a.tokens / seconds:9.0f} {limit_s / seconds:15.2f}")
    print(f"{'matmul limit':22} {limit_s:9.2f} {a.tokens / limit_s:9.0f}")
    result = {
        "name": "train_step",
        "ours": a.tokens / medians["ours"],
        "theirs": a.tokens / medians[best],
        "ratio": medians[best] / medians["ours"],
        "limit": limit_s / medians["ours"],
        "unit": "tokens per second",
        "theirs_is": best,
        "machine": describe(),
    }
    print(json.dumps(result))


def our_side(model: Transformer, ids: torch.Tensor) -> Callable[[], None]:
    """What the trainer does with one pack, but for the optimizer."""
    parts = []
    for i, row in enumerate(ids.tolist()):
        parts.append(Part(row[:1], [Sample(SampleId(i, 0), row[1:])]))
    pack = build_pack(parts, "cpu")

    def step() -> None:
        hidden = model(pack.token_ids, pack.rows).index_select(0, pack.hidden_index)
        logprobs, _ = chunked_logprobs(hidden, model.head_weight, pack.targets, 1.0)
        backward(logprobs, model)

    return step


def backward(logprobs: torch.Tensor, model: torch.nn.Module) -> None:
    loss = -(logprobs - logprobs.detach()).exp().mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def their_side(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        logits = model(ids, use_cache=False).logits[:, :-1]
        logprobs = -F.cross_entropy(
            logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        backward(logprobs, model)

    return step


def limit(model: Transformer, n_rows: int) -> float:
    """Seconds of all matrix products, forward and backward (twice the forward's flops), at the rate
    measured for each shape. Attention's products and everything else count as nothing."""
    shapes = [
        tuple(weight.shape)
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and name != "embedding"
    ] + [tuple(model.head_weight.shape)]
    rates: dict[tuple[int, ...], float] = {}
    for shape in set(shapes):
        rates[shape] = gemm_seconds(n_rows, *shape, model.dtype)
    for shape, seconds in sorted(rates.items()):
        flops = 3 * 2 * n_rows * shape[0] * shape[1]
        print(f"gemm {n_rows} x {shape[1]} -> {shape[0]}: {flops / seconds / 1e9:.0f} GFLOP/s")
    return sum(rates[shape] for shape in shapes)


def gemm_seconds(n_rows: int, n_out: int, n_in: int, dtype: torch.dtype) -> float:
    """Forward and both backward products of one linear layer: the best of several runs."""
    x, w = torch.randn(n_rows, n_in).to(dtype), torch.randn(n_out, n_in).to(dtype)
    g = torch.randn(n_rows, n_out).to(dtype)
    best = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        F.linear(x, w)
        g @ w
        g.t() @ x
        best = min(best, time.perf_counter() - start_s)
    return best


if __name__ == "__main__":
    main()
