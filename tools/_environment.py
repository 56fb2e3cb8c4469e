"""Import this first in the scripts of this folder: without kvabr's environment, it prints how to create it."""

import sys
from importlib.util import find_spec
from pathlib import Path

_root = Path(__file__).resolve().parent.parent
if find_spec("kvabr") is None or find_spec("numpy") is None:
    name = Path(sys.argv[0]).name
    sys.exit(
        f"{name}: kvabr is not installed for {sys.executable}; create its environment with tools/setup-venv, and run "
        f".venv/bin/python tools/{name} in {_root}"
    )
