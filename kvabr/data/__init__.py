"""Data shipped with the package: codec profiles, a catalog of SmolLM2, and network traces."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvabr.data.profiles import SMOLLM2
from kvabr.types.catalog import Catalog

CATALOG = "smollm2-8k.catalog.json"


def default_catalog() -> Catalog:
    """Return the catalog of 8,064 tokens of source code under SmolLM2-135M, for replays without a model."""
    return Catalog.loads(files(__name__).joinpath(CATALOG).read_bytes())


def default_profile_bytes() -> bytes:
    """Return the codec profile of the default catalog, for `Profile.from_bytes`."""
    return SMOLLM2.read()


def traces_folder() -> Path:
    """Return the folder of the synthetic network traces; its README describes their generation."""
    installed = Path(__file__).parent / "traces"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "traces"  # a checkout
