"""The compiled kernels for CPUs: built on first use into one library with a plain C interface.

Owns: finding a compiler, building the `*_cpu.cpp` files into a cache, whether kernels are used, the
thread pool they get. Does not own: what they compute (`attention_cpu`, `rowwise_cpu`, `logits_cpu`
call them, `attention`, `rowwise` and `step.logprob` say what it means and have a plain torch twin).

The kernels have no OpenMP code of their own: they are handed GOMP_parallel of the runtime that
torch uses, so there is one thread pool, whatever the compiler, and nothing to link.
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
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / f"{name}_cpu.cpp" for name in ("attention", "rowwise", "logits"))
_HEADERS = (_FOLDER / "vectors.h", _FOLDER / "attention_cpu.h")
# -ffp-contract=fast: a * b + c is one rounding everywhere, so every path has the same arithmetic.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno")
# GCC splits some chains of them again into a product and a sum where it tunes for an AMD Zen.
_GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # in the names of functions
forced_eager = os.environ.get("TWOFOLD_KERNELS") == "eager"  # a variable, so that tests can switch

# ------------------------------------------------------------------ building

_lock = threading.Lock()
_loaded: list[tuple[ctypes.CDLL | None, str]] = []  # one entry once tried


def load() -> ctypes.CDLL | None:
    """The library, built unless the cache has it; None when that is impossible (never an error)."""
    return _load()[0]


def unavailable_reason() -> str:
    """Why `load()` is None, in one line; empty when it is not."""
    return _load()[1]


def why_not_used() -> str:
    """Empty where the kernels are used; else why plain torch computes."""
    return "TWOFOLD_KERNELS=eager" if forced_eager else unavailable_reason()


def used_for(x: torch.Tensor) -> bool:
    """Whether kernels compute with `x`: a tensor on the CPU, float32 or bfloat16."""
    return x.is_cpu and x.dtype in DTYPES and not forced_eager and load() is not None


def _load() -> tuple[ctypes.CDLL | None, str]:
    if _loaded:
        return _loaded[0]
    with _lock:
        if not _loaded:
            try:
                _loaded.append((ctypes.CDLL(str(_built())), ""))
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
    """Path of the shared library for these sources, this compiler and CPU.

    The compiler's predefined macros name its version and every instruction set that -march=native
    found, so the cache is keyed by them and the sources.
    """
    compiler = _compiler()
    macros = _run(*compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    flags = _FLAGS if "__clang__" in macros else _FLAGS + _GCC_FLAGS
    texts = [path.read_text() for path in (*_SOURCES, *_HEADERS)]
    key = hashlib.sha256("\0".join([*texts, *flags, *compiler, macros]).encode())
    folder = _cache_folder()
    library = folder / f"kernels-{key.hexdigest()[:32]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # one process builds, the others find it done
        if not library.exists():
            aside = library.with_suffix(f".{os.getpid()}")
            sources = map(str, _SOURCES)
            _run(*compiler, *flags, "-fPIC", "-shared", *sources, "-o", str(aside))
            aside.rename(library)
    return library


# ------------------------------------------------------------------ calling


def function(name: str, argtypes: list[Any]) -> Callable[..., int]:
    """The library's function of this name; what it returns means something only where the C++ file
    says so. Only where `load()` is not None."""
    library = load()
    assert library is not None, unavailable_reason()
    found = library[name]
    found.argtypes, found.restype = argtypes, c_int
    return found


def for_rows(name: str, argtypes: list[Any]) -> dict[torch.dtype, Callable[..., int]]:
    """The function `name` for each dtype. Its arguments begin with the pool's two, which are put
    in here, and go on with `argtypes`."""
    pool_types = [c_void_p, c_int64]

    def of_dtype(dtype: torch.dtype) -> Callable[..., int]:
        found = function(f"twofold_{name}_{DTYPES[dtype]}", pool_types + argtypes)
        return lambda *arguments: found(parallel(), torch.get_num_threads(), *arguments)

    return {dtype: of_dtype(dtype) for dtype in DTYPES}


@functools.cache
def parallel() -> int | None:
    """Address of GOMP_parallel in torch's OpenMP runtime (GNU's, LLVM's and Intel's all have it),
    looked up in the dynamic linker's own order; None: no OpenMP, kernels use one thread."""
    libtorch = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (None, str(libtorch)):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def threads() -> int:
    """How many threads a kernel uses: torch's, or 1 when torch has no OpenMP."""
    return torch.get_num_threads() if parallel() else 1
