"""Run the kernels in Triton's interpreter where there is no GPU, without affecting the rest of the suite."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

INTERPRET = "TRITON_INTERPRET"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if find_spec("triton") is not None and DEVICE.type == "cpu":
    # Triton reads the environment while loading, and again when kernels run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRET, "1")
        import kvabr.codec.gpu.kernels  # noqa: F401


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret, if there is nothing to compile for."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv(INTERPRET, "1")
