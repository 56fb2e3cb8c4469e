"""Where there is no GPU, the kernels run in Triton's interpreter: nothing else in the suite shall know."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

INTERPRET = "TRITON_INTERPRET"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if find_spec("triton") is not None and DEVICE.type == "cpu":
    # Triton looks at the environment as it is loaded, and again as kernels run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRET, "1")
        import kvabr.codec.gpu.kernels  # noqa: F401


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret, if there is nothing to compile for."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv(INTERPRET, "1")
