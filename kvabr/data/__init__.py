"""Data that ships with the package: the profile of SmolLM2, and the catalog of a real encode of it."""

from __future__ import annotations

from importlib.resources import files

from kvabr.types.catalog import Catalog

CATALOG = "smollm2-8k.catalog.json"
PROFILE = "smollm2.profile.safetensors"


def default_catalog() -> Catalog:
    """The catalog of 8,064 tokens of source code under SmolLM2-135M: for replays without a model at hand."""
    return Catalog.loads(files(__name__).joinpath(CATALOG).read_bytes())


def default_profile_bytes() -> bytes:
    """The codec profile of SmolLM2-135M; read it with `Profile.from_bytes`.

    Made as `kvabr calibrate` makes them, of 53 contexts of 1,024 tokens: Python's manual (12), English manual pages
    (22), texts that the model wrote by itself (13), made-up records (6). No source code, licence, chat or other
    language.
    """
    return files(__name__).joinpath(PROFILE).read_bytes()
