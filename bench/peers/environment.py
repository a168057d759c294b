"""A virtual environment of its own for each peer, made once.

Owns: where they are and how they are made. Peers' packages never enter Twofold's own environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twofold.model.resolve import cache_folder

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def python_of(name: str, packages: list[str]) -> Path:
    """The interpreter of the environment `name` with these packages (pinned by the caller; torch
    and transformers by our constraints, so that both sides run the same)."""
    folder = cache_folder().parent / "peers" / name
    python = folder / "bin" / "python"
    done = folder / ".installed"
    wanted = "\n".join(packages)
    if done.is_file() and done.read_text() == wanted:
        return python
    print(f"making {folder} with {', '.join(packages)} (once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *packages]
    subprocess.run(install, check=True)
    done.write_text(wanted)
    return python
