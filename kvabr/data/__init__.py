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

    It was made as by `kvabr calibrate --gain --step-scale 1.15`, from 55 contexts of 1,024 tokens: English manual pages
    (18), Python's manual (12), answers sampled from the model (12), made-up records (5), and manual pages in Spanish,
    Russian, Chinese (2 each), Polish and Portuguese (1 each). Gains are those of 7 of them. The threshold for tokens
    that are stored separately was set afterwards, to what half a per cent of a part of these exceed. It saw no source
    code, licences, stories or chat, and of the languages of `tools/fetch-texts` only Russian and Chinese.
    """
    return files(__name__).joinpath(PROFILE).read_bytes()


def traces_folder() -> Path:
    """Return the folder of the synthetic network traces; its README says how they were made."""
    installed = Path(__file__).parent / "traces"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "traces"  # a checkout
