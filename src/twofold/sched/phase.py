"""The phases of a card: which may follow which.

Owns: the table, the picture of it in the documentation, and which command needs which phase.
Does not own: when a card changes phase (`scheduler`), what a change does (the worker).
"""

from __future__ import annotations

from twofold import events as ev
from twofold.types import Phase

TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    Phase.IDLE: (Phase.EVAL, Phase.GENERATE, Phase.SCORE, Phase.TRAIN),
    Phase.GENERATE: (Phase.SCORE, Phase.TRAIN, Phase.EVAL),
    Phase.SCORE: (Phase.TRAIN,),
    Phase.TRAIN: (Phase.PUBLISH,),
    # the next batch may be ready at once: then nothing is generated in between
    Phase.PUBLISH: (Phase.GENERATE, Phase.SCORE, Phase.TRAIN, Phase.EVAL),
    Phase.EVAL: (Phase.GENERATE, Phase.SCORE, Phase.TRAIN),
}
"""Phase -> those that a Switch may lead to. SWITCH itself is the time on an edge, not a node."""

PHASE_OF: dict[type[ev.Command], Phase] = {
    ev.Generate: Phase.GENERATE,
    ev.Score: Phase.SCORE,
    ev.Train: Phase.TRAIN,
    ev.Publish: Phase.PUBLISH,
    ev.Evaluate: Phase.EVAL,
    ev.Switch: Phase.SWITCH,
}
"""The phase of a card while the command runs. Checkpoint and Receive run in any of them."""


def mermaid() -> str:
    """The table as a mermaid state diagram."""
    edges = [f"    {a} --> {b}" for a, after in TRANSITIONS.items() for b in after]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {Phase.IDLE}", *edges])
