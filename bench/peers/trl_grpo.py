"""Some steps of TRL's GRPOTrainer on one-digit addition; run in TRL's own environment.

Prints one JSON line a step: {"step", "seconds", "reward"}. Imports nothing of Twofold.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def last_number(prompts, completions, answer, **columns):
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(n[-1:] == [right]) for n, right in zip(found, answer, strict=True)]


class Report(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        self.start_s = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            seconds = time.perf_counter() - self.start_s
            row = {"step": state.global_step, "seconds": seconds, "reward": float(logs["reward"])}
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    a = parser.parse_args()
    pairs = [(x, y) for x in range(1, 10) for y in range(1, 10)]
    random.Random(0).shuffle(pairs)
    rows = [
        {
            "prompt": [
                {"role": "user", "content": f"What is {x} + {y}? Reply with only the number."}
            ],
            "answer": str(x + y),
        }
        for x, y in pairs[24:] * 20
    ]
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=a.micro_batch,
            gradient_accumulation_steps=64 // a.micro_batch,
            num_generations=8,
            max_completion_length=a.max_new_tokens,
            temperature=1.0,
            learning_rate=a.learning_rate,
            adam_beta2=0.95,
            lr_scheduler_type="constant",
            beta=0.0,
            max_grad_norm=1.0,
            max_steps=a.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.accelerator.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            seed=0,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype)),
            processing_class=AutoTokenizer.from_pretrained(a.model),
            reward_funcs=last_number,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Report()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
