"""What the tests of the real model share: one loaded model, one small asset that was really encoded."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest
import torch

from kvabr.cli.main import main
from kvabr.engines.transformers.model_loader import LoadedModel, load_model
from kvabr.publish.texts import measuring_texts
from kvabr.store.asset import Asset
from kvabr.store.asset_folder import FolderAsset

# The suite runs beside other work more often than not, and threads that wait for each other spin.
torch.set_num_threads(1)

# A shell starts what it puts into the background deaf to Ctrl-C, and some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What a change must pass says the same twice. `HYPOTHESIS_PROFILE=search` looks for new counterexamples.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("search")
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ASSET_TOKENS = 300
"""Three groups, the last one short."""


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """SmolLM2 from its package; fails, and says how to install it, where that is missing."""
    return load_model("smollm2")


@pytest.fixture(scope="session")
def asset(tmp_path_factory: pytest.TempPathFactory) -> Asset:
    """A real encode by the command itself; tests must not write into it."""
    folder = tmp_path_factory.mktemp("encoded")
    (folder / "text.txt").write_text(measuring_texts()["manual"][:4000])
    out = folder / "asset"
    status = main(
        [
            "encode", "--text", str(folder / "text.txt"), "--tokens", str(ASSET_TOKENS), "--continuation", "32",
            "--out", str(out), "--json", str(folder / "encode.json"),
        ]
    )  # fmt: skip
    assert status == 0
    return FolderAsset.open(out)
