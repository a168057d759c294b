"""A reward of one's own, in the signature that TRL users know.

Every argument is a list with one entry per completion; columns of the data arrive by name.
"""

import re


def near_product(completions, answer, **columns):
    """1.0 for the right product as the last number of the reply, 0.2 for one that is off by at most
    ten percent, else 0.0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", completion[-1]["content"])
        if not numbers:
            rewards.append(0.0)
            continue
        error = abs(int(numbers[-1]) - int(expected)) / int(expected)
        rewards.append(1.0 if error == 0 else 0.2 if error <= 0.1 else 0.0)
    return rewards
