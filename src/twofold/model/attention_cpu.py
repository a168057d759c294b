"""The compiled attention kernel for CPUs: built on first use, called through its plain C interface.

Owns: finding a compiler, building `attention_cpu.cpp` into a cache, the autograd function around
the kernel. Does not own: the arithmetic (the C++ file), what rows mean and when to use this
(`attention`).

The kernel has no OpenMP code of its own: it is handed GOMP_parallel of the runtime that torch uses,
so there is one thread pool, whatever the compiler, and nothing to link.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import threading
from ctypes import POINTER, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

if TYPE_CHECKING:
    from twofold.model.attention import Rows

_SOURCE = Path(__file__).with_name("attention_cpu.cpp")
_HEADER = Path(__file__).with_name("attention_cpu.h")
# -ffp-contract=fast: a * b + c is one rounding everywhere, so every path has the same arithmetic.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno")
_DTYPES = (torch.float32, torch.bfloat16)
_PADDING = 16  # head sizes are padded to a multiple of this inside the kernel


class _View(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("row", c_int64), ("head", c_int64)]


class _Call(ctypes.Structure):
    """`Call` in the C++ file, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("n_rows", "heads", "kv_heads", "head_size", "n_key_rows")),
        *((name, c_int64) for name in ("n_spans", "n_key_index", "is_bfloat16", "threads")),
        ("parallel", c_void_p),
        *((name, _View) for name in ("q", "k", "v")),
        *((name, c_void_p) for name in ("spans", "key_starts", "key_index", "out", "lse")),
        ("out_grad", _View),
        *((name, c_void_p) for name in ("q_grad", "k_grad", "v_grad", "partial")),
    ]


# ------------------------------------------------------------------ building

_lock = threading.Lock()
_loaded: list[tuple[ctypes.CDLL | None, str]] = []  # one entry once tried


def load() -> ctypes.CDLL | None:
    """The kernel, built unless the cache has it; None when that is impossible (never an error)."""
    return _load()[0]


def unavailable_reason() -> str:
    """Why `load()` is None, in one line; empty when it is not."""
    return _load()[1]


def _load() -> tuple[ctypes.CDLL | None, str]:
    with _lock:
        if not _loaded:
            try:
                _loaded.append((_open(_built()), ""))
            except (OSError, _CannotBuild) as error:
                _loaded.append((None, str(error)))
        return _loaded[0]


class _CannotBuild(Exception):
    pass


def _compiler() -> list[str]:
    """The command: what CXX says (it may have arguments), or the first usual name there is."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in asked[:1] or ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path, *asked[1:]]
    raise _CannotBuild(f"no C++ compiler found ({asked[0] if asked else 'g++, clang++, c++'})")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise _CannotBuild(f"{command[0]} failed: {errors[0] if errors else done.stderr[:200]}")
    return done.stdout


def _cache_folder() -> Path:
    cache = os.environ.get("TWOFOLD_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "twofold") / "kernels"


def _built() -> Path:
    """Path of the shared library for this source, compiler and CPU.

    The compiler's predefined macros name its version and every instruction set that -march=native
    found, so the cache is keyed by them and the source.
    """
    compiler = _compiler()
    macros = _run(*compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    text = [_SOURCE.read_text(), _HEADER.read_text(), *_FLAGS, *compiler, macros]
    key = hashlib.sha256("\0".join(text).encode())
    folder = _cache_folder()
    library = folder / f"attention_cpu-{key.hexdigest()[:32]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # one process builds, the others find it done
        if not library.exists():
            aside = library.with_suffix(f".{os.getpid()}")
            _run(*compiler, *_FLAGS, "-fPIC", "-shared", str(_SOURCE), "-o", str(aside))
            aside.rename(library)
    return library


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for function in (library.twofold_attention_forward, library.twofold_attention_backward):
        function.argtypes, function.restype = [POINTER(_Call)], c_int
    return library


@functools.cache
def _parallel() -> int | None:
    """Address of GOMP_parallel in torch's OpenMP runtime (GNU's, LLVM's and Intel's all have it),
    looked up in the dynamic linker's own order; None: no OpenMP, the kernel uses one thread."""
    libtorch = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (None, str(libtorch)):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def threads() -> int:
    """How many threads the kernel uses: torch's, or 1 when torch has no OpenMP."""
    return torch.get_num_threads() if _parallel() else 1


# ------------------------------------------------------------------ calling


def attend_cpu(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """`attention.attend` on the CPU: q [n, heads, head_size]; k, v [n_key_rows, kv_heads,
    head_size], all float32 or all bfloat16 (arithmetic in fp32); returns [n, heads, head_size],
    contiguous.

    The result of a row depends, to the last bit, only on its query and its keys and values in order
    of position. Gradients in q, k and v are the same in every run with the same number of threads.
    Only with `load() is not None`.
    """
    q, k, v = (_readable(x) for x in (q, k, v))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attend.apply(q, k, v, rows)
    return _forward(q, k, v, rows, None)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        out = _forward(q, k, v, rows, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rows = rows
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wants_keys = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        return *_backward(q, k, v, ctx.rows, out, lse, _readable(out_grad), wants_keys), None


def _readable(x: Tensor) -> Tensor:
    """Any stride between rows and heads is fine (a slice of a fused projection)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _view(x: Tensor) -> _View:
    return _View(x.data_ptr(), x.stride(0), x.stride(1))


def _call(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> _Call:
    assert q.dtype in _DTYPES and q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.device.type == k.device.type == v.device.type == "cpu"
    n_rows, heads, head_size = q.shape
    n_key_rows, kv_heads, _ = k.shape
    assert k.shape == v.shape == (n_key_rows, kv_heads, head_size) and heads % kv_heads == 0
    spans, starts, index = rows.spans, rows.key_starts, rows.key_index
    assert spans.dtype == np.int64 and spans.flags.c_contiguous and spans.shape == (len(starts), 3)
    assert int(spans[:, 1].sum()) == n_rows, "the spans do not cover the rows"
    assert starts.dtype == index.dtype == torch.int64
    assert starts.is_contiguous() and index.is_contiguous()
    return _Call(
        n_rows=n_rows,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        n_key_rows=n_key_rows,
        n_spans=len(spans),
        n_key_index=len(index),
        is_bfloat16=q.dtype == torch.bfloat16,
        threads=threads(),
        parallel=_parallel(),
        q=_view(q),
        k=_view(k),
        v=_view(v),
        spans=spans.ctypes.data,
        key_starts=starts.data_ptr(),
        key_index=index.data_ptr(),
    )


def _check(status: int) -> None:
    assert status != 1, "a span, key_starts or key_index points outside the rows or keys"
    if status:
        raise MemoryError("attention kernel: no memory for a tile")


def _forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows, lse: Tensor | None) -> Tensor:
    library = load()
    assert library is not None, unavailable_reason()
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _call(q, k, v, rows)
    call.out = out.data_ptr()
    call.lse = None if lse is None else lse.data_ptr()
    _check(library.twofold_attention_forward(call))
    return out


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    out: Tensor,
    lse: Tensor,
    out_grad: Tensor,
    wants_keys: bool,
) -> tuple[Tensor | None, ...]:
    library = load()
    assert library is not None, unavailable_reason()
    call = _call(q, k, v, rows)
    call.out, call.lse, call.out_grad = out.data_ptr(), lse.data_ptr(), _view(out_grad)
    q_grad = torch.empty(q.shape, dtype=q.dtype)
    call.q_grad = q_grad.data_ptr()
    k_grad = v_grad = None
    if wants_keys:
        k_grad, v_grad = (torch.empty(k.shape, dtype=k.dtype) for _ in range(2))
        padded = -(-q.shape[2] // _PADDING) * _PADDING
        partial = torch.empty(call.threads * 2 * k.shape[0] * k.shape[1] * padded)
        call.k_grad, call.v_grad = k_grad.data_ptr(), v_grad.data_ptr()
        call.partial = partial.data_ptr()
    _check(library.twofold_attention_backward(call))
    return q_grad, k_grad, v_grad
