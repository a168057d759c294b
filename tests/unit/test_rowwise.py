"""What a decoder does between its matrix products: compiled kernels give what plain torch gives,
forward and backward, and a row is the same bits whatever else is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from twofold.model import cpu_kernels, rowwise

WIDTHS = [8, 20, 32, 576]
DTYPES = [torch.float32, torch.bfloat16]
# of values around 1: a few roundings of the dtype
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (3e-2, 3e-2)}


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    if cpu_kernels.load() is None:
        pytest.skip(cpu_kernels.unavailable_reason())
    torch.manual_seed(seed)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def with_gradients(call: Callable[[], tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of a fixed weighted sum of them."""
    outputs = call()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, weights)]


def compare(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], tuple[Tensor, ...]], inputs: list[Tensor]
) -> None:
    kernel = with_gradients(call, inputs)
    monkeypatch.setattr(cpu_kernels, "forced_eager", True)
    twin = with_gradients(call, inputs)
    for got, want in zip(kernel, twin, strict=True):
        assert got.dtype == want.dtype
        rtol, atol = TOLERANCE[got.dtype]
        scale = max(1.0, float(want.detach().abs().max()))  # gains sum over all rows
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [1, 3, 200])
def test_add_norm(monkeypatch: pytest.MonkeyPatch, n: int, width: int, dtype: torch.dtype) -> None:
    x, delta, gain = random(n, width, dtype=dtype), random(n, width, dtype=dtype), random(width)
    gain = gain.detach().to(dtype).requires_grad_()
    compare(monkeypatch, lambda: rowwise.add_norm(x, delta, gain, 1e-5), [x, delta, gain])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype) -> None:
    x, gain = random(70, width, dtype=dtype), random(width, dtype=dtype)
    compare(monkeypatch, lambda: (rowwise.rms_norm(x, gain, 1e-5),), [x, gain])


def test_a_sum_whose_norm_is_not_used_passes_its_gradient_on() -> None:
    x, delta, gain = random(5, 16), random(5, 16), random(16)
    total, _ = rowwise.add_norm(x, delta, gain, 1e-5)
    grads = torch.autograd.grad(total.square().sum(), [x, delta])
    assert torch.equal(grads[0], 2 * total) and torch.equal(grads[1], 2 * total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 20, 1536])
def test_gated(monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype) -> None:
    gate_up = random(37, 2 * width, dtype=dtype)
    compare(monkeypatch, lambda: (rowwise.gated(gate_up),), [gate_up])


def test_gates_far_from_zero_neither_overflow_nor_lose_their_sign() -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]])
    gate_up = torch.cat([gate, torch.ones(1, 8)], 1).requires_grad_()
    out = rowwise.gated(gate_up)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate))
    (grad,) = torch.autograd.grad(out.sum(), gate_up)
    assert grad.isfinite().all()
    assert grad[0, :2].tolist() == [0, 0] and grad[0, 6:8].tolist() == [1, 1]


def angles(n: int, size: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(n, size // 2) * 7
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 2, 8), (2, 2, 20)])
@pytest.mark.parametrize("fused", [True, False])
def test_rotary(
    monkeypatch: pytest.MonkeyPatch,
    fused: bool,
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    n = 50
    cos, sin = angles(n, size)
    qkv = random(n, heads + 2 * kv_heads, size, dtype=dtype)

    def call() -> tuple[Tensor, ...]:
        qk, v = (qkv, None) if fused else qkv.split((heads + kv_heads, kv_heads), dim=1)
        return rowwise.rotary(qk, v, cos, sin, kv_heads)

    compare(monkeypatch, call, [qkv])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eager", [False, True])
def test_keys_and_values_go_to_their_slots(
    monkeypatch: pytest.MonkeyPatch, eager: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(cpu_kernels, "forced_eager", eager)
    qkv = random(4, 8, 16, dtype=dtype).detach()
    cos, sin = angles(4, 16)
    q, k, v = rowwise.rotary(qkv, None, cos, sin, 2)
    keys, values = (torch.full((10, 2, 16), 7.0).to(dtype) for _ in range(2))
    slots = torch.tensor([9, 0, 4, 5])
    got = rowwise.rotary(qkv, None, cos, sin, 2, (keys, values, slots))
    assert torch.equal(got[0], q) and got[1] is keys and got[2] is values
    assert torch.equal(keys[slots], k) and torch.equal(values[slots], v)
    others = torch.tensor([1, 2, 3, 6, 7, 8])
    assert (keys[others] == 7).all() and (values[others] == 7).all()


@pytest.mark.parametrize("slot", [-1, 10])
def test_a_slot_outside_the_cache_is_refused(slot: int) -> None:
    cache = torch.zeros(10, 2, 16), torch.zeros(10, 2, 16), torch.tensor([3, slot])
    with pytest.raises(AssertionError, match="slot"):
        rowwise.rotary(torch.ones(2, 8, 16), None, *angles(2, 16), 2, cache)
    assert not cache[0].any() and not cache[1].any()


# ---------------------------------------------------------------- the same bits


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("_threads")
def test_a_row_is_the_same_bits_with_any_others_and_any_threads(dtype: torch.dtype) -> None:
    n, width = 900, 576
    x, delta = random(n, width, dtype=dtype), random(n, width, dtype=dtype)
    gain, gate_up = random(width, dtype=dtype), random(n, 2 * width, dtype=dtype)
    cos, sin = angles(n, 64)

    def rows(first: int, end: int) -> list[Tensor]:
        r = slice(first, end)
        parts = [p[r].detach().requires_grad_() for p in (x, delta, gate_up)]

        total, normed = rowwise.add_norm(parts[0], parts[1], gain, 1e-5)
        turns = cos[r].contiguous(), sin[r].contiguous()
        rotated = rowwise.rotary(normed.unflatten(1, (9, 64)), None, *turns, 2)
        outputs = (total, rowwise.gated(parts[2]), *rotated)
        ones = [torch.ones_like(output) for output in outputs]
        return [*outputs, *torch.autograd.grad(outputs, parts, ones)]

    torch.set_num_threads(1)
    whole = rows(0, n)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, end in ((0, n), (0, 1), (17, 18), (5, 700), (880, n)):
            for got, want in zip(rows(first, end), whole, strict=True):
                assert torch.equal(got, want[first:end]), (threads, first, end)


@pytest.mark.usefixtures("_threads")
def test_gain_gradients_do_not_depend_on_threads() -> None:
    x, gain = random(3000, 64), random(64)
    grads = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = rowwise.rms_norm(x, gain, 1e-5)
        grads.append(torch.autograd.grad(out.square().sum(), gain)[0])
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
