"""What all tests share: settings, the real model loaded once, and a small asset that was really encoded."""

from __future__ import annotations

import fcntl
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

# Tests run in parallel, and threads that wait for each other spin.
torch.set_num_threads(1)

# Shells start background jobs with Ctrl-C ignored, and some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run tries the same examples, however slow the machine; `HYPOTHESIS_PROFILE=search` looks for new ones.
_PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, **_PATIENT)
hypothesis.settings.register_profile("search", **_PATIENT)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ASSET_TOKENS = 300
"""Three groups, the last one short."""
_MODEL_FIXTURES = {"loaded", "encoded"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a fixture of the real model."""
    for item in items:
        if _MODEL_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """SmolLM2 from its package; fails, and says how to install it, where that is missing."""
    return load_model("smollm2")


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Asset:
    """An asset encoded by the command itself, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "encoded"
    folder.mkdir(exist_ok=True)
    out = folder / "asset"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            (folder / "text.txt").write_text(measuring_texts()["manual"][:4000])
            status = main(
                [
                    "encode", "--text", str(folder / "text.txt"), "--tokens", str(ASSET_TOKENS), "--continuation", "32",
                    "--out", str(out), "--json", str(folder / "encode.json"),
                ]
            )  # fmt: skip
            assert status == 0
    return FolderAsset.open(out)


@pytest.fixture(scope="session")
def asset(encoded: Asset) -> Asset:
    """The encoded asset; tests must not write into it."""
    return encoded
