"""Data shipped with the package: the profile of SmolLM2, the catalog of a real encode of it, and network traces."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvabr.types.catalog import Catalog

CATALOG = "smollm2-8k.catalog.json"
PROFILE = "smollm2.profile.safetensors"


def default_catalog() -> Catalog:
    """Return the catalog of 8,064 tokens of source code under SmolLM2-135M, for replays without a model."""
    return Catalog.loads(files(__name__).joinpath(CATALOG).read_bytes())


def default_profile_bytes() -> bytes:
    """Return the codec profile of SmolLM2-135M; parse it with `Profile.from_bytes`.

    It was made with `kvabr calibrate` from 53 contexts of 1,024 tokens: Python's manual (12), English manual pages
    (22), texts sampled from the model (13), and made-up records (6). It saw no source code, licences, chat or other
    languages.
    """
    return files(__name__).joinpath(PROFILE).read_bytes()


def traces_folder() -> Path:
    """Return the folder of the synthetic network traces; its README says how they were made."""
    installed = Path(__file__).parent / "traces"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "traces"  # a checkout
