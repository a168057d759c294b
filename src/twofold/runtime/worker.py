"""One card: one model that generates and trains, and everything that works on it.

Owns: the model, the trainer, the generator, the reference model, and what each card command does
with them; it is the only place where `step` meets the store. Does not own: the order of commands
(`sched`), waiting and clocks (`runtime/local`), durability (the record).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from twofold.config import Config
from twofold.events import (
    Cancelled,
    Checkpoint,
    Checkpointed,
    Command,
    Discard,
    Discarded,
    Evaluate,
    Evaluated,
    Finished,
    Generate,
    Generated,
    Publish,
    Published,
    Score,
    Scored,
    Switch,
    Switched,
    Terminal,
    Train,
    Trained,
)
from twofold.memory.meter import PhaseMeter
from twofold.model import weights
from twofold.obs.record import (
    AdvantageRow,
    DroppedRow,
    FinishedRow,
    GroupRow,
    MetricRow,
    TrainedRow,
    VersionRow,
)
from twofold.runtime import checkpoint
from twofold.runtime.store import Store
from twofold.sched.phase import PHASE_OF
from twofold.step.evaluate import EvalSet, Judge, evaluate
from twofold.step.generate import Generator
from twofold.step.prompts import PromptSource, decode_completion, encode_prompt
from twofold.step.sampling import Sampling
from twofold.step.stops import StopStrings
from twofold.step.switch import switch
from twofold.step.train import Trainer
from twofold.tasks.load import Task
from twofold.types import Group, Prompt, Sample, SampleId


class Worker:
    """`execute(command)` does it and returns its terminal event; durable rows go to the store."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        run_dir: Path,
        task: Task,
        store: Store,
        judge: Judge,
        stopped: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self.config = config
        self.version = 0
        self._store = store
        self._judge = judge
        self._stopped = stopped
        dtype = getattr(torch, config.model.dtype)
        self.model = weights.load_model(folder, dtype, device)
        self.tokenizer = weights.load_tokenizer(folder)
        self.reference = None
        if config.train.kl_coef > 0:
            self.reference = weights.load_model(folder, dtype, device).requires_grad_(False)
        self.trainer = Trainer(
            self.model,
            config.train,
            temperature=config.rollout.temperature,
            max_staleness=config.sched.max_staleness,
            total_steps=config.train.steps,
            max_new_tokens=config.rollout.max_new_tokens,
        )
        rollout = config.rollout
        self.sampling = Sampling(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            max_new_tokens=rollout.max_new_tokens,
            stop_ids=weights.stop_ids(folder),
            stop_strings=StopStrings(self.tokenizer, rollout.stop) if rollout.stop else None,
        )
        self.generator = Generator(
            self.model,
            self.sampling,
            seed=config.run.seed,
            stream="train",
            max_running_samples=rollout.max_running_samples,
            kv_cache_tokens=rollout.kv_cache_tokens,
            kv_block_tokens=rollout.kv_block_tokens,
        )
        self._source = PromptSource(task.train, config.run.seed, task.shares)
        self._prompt_ids = [self._encode(prompt) for prompt in task.train]
        self._eval_set = EvalSet(task.held_out, [self._encode(prompt) for prompt in task.held_out])
        self._checkpoints = run_dir / "checkpoints"
        self._memory = PhaseMeter(device)

    def execute(self, command: Command) -> Terminal:
        start_s = time.monotonic()
        if type(command) in PHASE_OF:
            self._memory.begin(PHASE_OF[type(command)])
        event = self._dispatch(command)
        return replace(event, seconds=time.monotonic() - start_s)

    def _dispatch(self, command: Command) -> Terminal:
        match command:
            case Generate():
                return self._generate(command)
            case Score():
                return self._score(command)
            case Train():
                return self._train(command)
            case Publish():
                return self._publish(command)
            case Switch():
                keep_kv = self.config.rollout.kv_after_update == "keep"
                switch(command.before, command.after, self.generator, self.trainer, keep_kv)
                return Switched(command=command.seq)
            case Evaluate():
                return self._evaluate(command)
            case Checkpoint():
                return self._checkpoint(command)
            case Discard():
                return self._discard(command)
        raise AssertionError(f"not a card command: {command}")

    # ------------------------------------------------------------ generation

    def _encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. ValueError when it leaves no room for the longest completion:
        all prompts are encoded before the run begins, so that none fails in its middle."""
        ids = encode_prompt(prompt, self.tokenizer, self.config.task.system_prompt)
        try:
            self.generator.check_fits(Group(0, prompt, ids, 0, 0))
        except ValueError as error:
            raise ValueError(f"{error} (prompt: {str(prompt.content)[:60]!r}...)") from None
        return ids

    def _generate(self, command: Generate) -> Generated:
        assert command.version == self.version, f"{command} on a card at version {self.version}"
        for group_id, start_version, deadline in command.admit:
            prompt = self._source.prompt(group_id)
            ids = self._prompt_ids[self._source.item(group_id)]
            samples = [
                Sample(SampleId(group_id, index)) for index in range(self.config.rollout.group_size)
            ]
            group = Group(group_id, prompt, ids, start_version, deadline, samples)
            self._store.add(group)
            row = GroupRow(group_id, prompt, ids, start_version, deadline, len(samples))
            self._store.write(row)
            self.generator.admit([group])
        quantum = self.generator.run(command.max_decode_steps)
        self._store.write(*quantum.chunks)
        for sample in quantum.finished:
            ids = sample.token_ids
            sample.text = decode_completion(
                self.tokenizer, ids, self.sampling.stop_ids, self.sampling.stop_strings
            )
            reason = sample.finish_reason
            assert reason is not None
            self._store.write(FinishedRow(sample.sample_id, len(ids), reason, sample.text))
        return Generated(
            command=command.seq,
            finished=tuple(Finished(*s.sample_id, len(s.token_ids)) for s in quantum.finished),
            n_tokens=quantum.n_tokens,
            decode_steps=quantum.decode_steps,
        )

    def _discard(self, command: Discard) -> Discarded:
        self._store.remove([command.group_id])
        self._store.write(DroppedRow(command.group_id, command.reason))
        return Discarded(command=command.seq, group_id=command.group_id)

    # ------------------------------------------------------------ training

    def _score(self, command: Score) -> Scored:
        assert self.reference is not None
        groups = [self._store[group_id] for group_id in command.group_ids]
        self.trainer.score(self.reference, groups)
        return Scored(command=command.seq)

    def _train(self, command: Train) -> Trained:
        assert command.version == self.version, f"{command} on a card at version {self.version}"
        groups = [self._store[group_id] for group_id in command.group_ids]
        metrics = self.train_groups(groups)
        made = self.version + self.config.train.updates_per_batch
        for group in groups:
            self._store.write(TrainedRow(group.group_id, self.version))
            for sample in group.samples:
                if sample.advantage is not None:
                    self._store.write(AdvantageRow(sample.sample_id, sample.advantage))
        self._write_metrics(made, metrics | self._memory.take())
        self._store.remove(command.group_ids)
        return Trained(command=command.seq, version=made)

    def train_groups(self, groups: list[Group]) -> dict[str, float]:
        """The updates of the weights from these groups; the version is published separately.
        Reference log-probs are not in the record: what a resume has lost is computed again."""
        if self.reference is not None:
            lost = [g for g in groups if any(s.valid and not s.ref_logprobs for s in g.samples)]
            self.trainer.score(self.reference, lost)
        return self.trainer.train(groups, self.version)

    def _publish(self, command: Publish) -> Published:
        self.publish(command.version)
        checksum = checkpoint.weights_checksum(self.model)
        self._store.write(VersionRow(command.version, checksum))
        return Published(command=command.seq, version=command.version)

    def publish(self, version: int) -> None:
        """Generation and training share the storage, so no byte moves: only the stamp changes."""
        made = self.version + self.config.train.updates_per_batch
        assert version == made, f"version {version} after {self.version}"
        self.version = self.generator.version = version

    def _write_metrics(self, version: int, metrics: dict[str, float]) -> None:
        self._store.write(*(MetricRow(version, name, value) for name, value in metrics.items()))

    # ------------------------------------------------------------ evaluation, checkpoints

    def _evaluate(self, command: Evaluate) -> Evaluated | Cancelled:
        assert command.version == self.version, f"{command} on a card at version {self.version}"
        metrics = evaluate(
            self.model,
            self.tokenizer,
            self._eval_set,
            self._judge,
            self.sampling,
            version=self.version,
            n_samples=self.config.run.eval_samples,
            seed=self.config.run.seed,
            max_running_samples=self.config.rollout.max_running_samples,
            kv_block_tokens=self.config.rollout.kv_block_tokens,
            stopped=self._stopped,
        )
        if metrics is None:
            return Cancelled(command=command.seq)
        self._write_metrics(self.version, metrics)
        return Evaluated(command=command.seq, version=self.version)

    def _checkpoint(self, command: Checkpoint) -> Checkpointed:
        assert command.version == self.version, f"{command} on a card at version {self.version}"
        tensors = self.trainer.state_tensors()
        checkpoint.save(self._checkpoints, self.version, tensors, {"version": self.version})
        checkpoint.prune(self._checkpoints, self.config.run.keep_checkpoints)
        return Checkpointed(command=command.seq, version=self.version)

    def load_checkpoint(self, newest: int) -> None:
        """The newest verified checkpoint of the run, of version `newest` at most; without one the
        weights stay as they are."""
        found = checkpoint.newest_verified(self._checkpoints, newest)
        if found is None:
            return
        version, path = found
        tensors, _ = checkpoint.load(
            path
        )  # on the host: the optimizer's own tensors take them over
        self.trainer.load_state_tensors(tensors)
        self.version = self.generator.version = version
