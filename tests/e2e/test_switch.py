"""A card that changes phase keeps its weights where they are and gives the rest back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.e2e.small import folder, small_config
from torch import Tensor

from twofold.events import Admission, Generate, Publish, Switch, Train
from twofold.runtime.store import Store
from twofold.runtime.worker import Worker
from twofold.tasks.load import load_task
from twofold.types import Phase

__all__ = ["folder"]

CACHE_TOKENS = 512


@pytest.fixture(autouse=True)
def only_what_is_made_here() -> Iterator[None]:
    """Leaves the rest of the process out of every look at what is alive, which takes so long."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Card:
    """A worker that is told what to do, and how many bytes it held at which moment."""

    def __init__(self, folder: Path, tmp_path: Path, dtype: str, kv: str, device: str) -> None:
        config = small_config(
            folder,
            tmp_path / "run",
            model__dtype=dtype,
            rollout__kv_after_update=kv,
            rollout__kv_cache_tokens=CACHE_TOKENS,
        )
        self.store, self.device, self.seq = Store(), torch.device(device), -1
        self.worker = Worker(
            config,
            folder,
            tmp_path / "run",
            load_task(config.task),
            self.store,
            lambda jobs: None,
            lambda: False,
            self.device,
        )

    def _stamp(self) -> dict[str, object]:
        self.seq += 1
        return {"seq": self.seq, "cards": (0,)}

    def switch(self, before: Phase, after: Phase) -> None:
        self.worker.execute(Switch(**self._stamp(), before=before, after=after))

    def generate(self, max_decode_steps: int, *group_ids: int) -> None:
        version = self.worker.version
        admit = tuple(Admission(group_id, version, version + 1) for group_id in group_ids)
        self.worker.execute(
            Generate(
                **self._stamp(), version=version, max_decode_steps=max_decode_steps, admit=admit
            )
        )

    def round(self, n: int) -> dict[str, int]:
        """Group n is finished and trained while group n + 1 is under way. Bytes at each moment."""
        held = {}
        self.switch(Phase.PUBLISH if n else Phase.IDLE, Phase.GENERATE)
        self.generate(*((2,) if n else (6, 0)))  # of 10 tokens
        self.generate(4, n + 1)
        while not self.store[n].finished:
            self.generate(1)
        unfinished = self.worker.generator.unfinished
        assert unfinished > 0, "nothing was paused"
        held["generating"] = self.held_bytes()
        self.switch(Phase.GENERATE, Phase.TRAIN)
        held["left generate"] = self.held_bytes()
        assert self.worker.generator.unfinished == unfinished
        for sample in self.store[n].samples:
            sample.reward = float(sample.sample_id.index)
        self.worker.execute(Train(**self._stamp(), version=n, group_ids=(n,)))
        held["trained"] = self.held_bytes()
        self.switch(Phase.TRAIN, Phase.PUBLISH)
        held["left train"] = self.held_bytes()
        self.worker.execute(Publish(**self._stamp(), version=n + 1))
        self.store.take_rows()
        return held

    def held_bytes(self) -> int:
        """What the device has handed out; on a CPU, what Python can reach of it."""
        gc.collect()
        if self.device.type != "cpu":
            return int(torch.accelerator.memory_allocated())
        alive = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
        alive += [t.grad for t in alive if t.is_leaf and t.grad is not None]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in alive)}
        return sum(storages.values())


def check_rounds(card: Card, kv: str) -> None:
    model = card.worker.model
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    cache_bytes = CACHE_TOKENS * model.spec.kv_bytes_per_token(model.dtype.itemsize)
    card.round(0)  # takes what libraries keep for ever
    rounds = [card.round(n) for n in (1, 2)]
    print(rounds, "cache", cache_bytes)
    for held in rounds:
        given_back = held["generating"] - held["left generate"]
        assert given_back == 0 if kv == "keep" else given_back >= cache_bytes
        assert held["trained"] - held["left train"] >= 4 * n_parameters  # float32 gradients
        assert held["left train"] == held["left generate"]
    assert rounds[0] == rounds[1], "memory grows with every round"
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_switch_gives_back_gradients_and_caches_and_moves_no_weight(
    folder: Path, tmp_path: Path, dtype: str, kv: str
) -> None:
    check_rounds(Card(folder, tmp_path, dtype, kv, "cpu"), kv)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_switch_on_the_accelerator(folder: Path, tmp_path: Path, kv: str) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    check_rounds(Card(folder, tmp_path, "bfloat16", kv, str(device)), kv)
