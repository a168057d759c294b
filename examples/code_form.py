"""A small second reward for code: its form."""


def has_block(completions, **columns):
    """1.0 where the reply has a block that is marked as Python and closed, else 0.0."""
    rewards = []
    for completion in completions:
        _, opening, rest = completion[-1]["content"].partition("```python\n")
        rewards.append(float(bool(opening) and "\n```" in rest))
    return rewards
