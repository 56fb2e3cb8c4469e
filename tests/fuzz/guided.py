"""One guided run of one target, in a process that atheris takes over: ``python -m tests.fuzz.guided TARGET ...``.

`tools/fuzz --guided` starts it, with the options of libFuzzer behind the name.
"""

import os
import sys

from tests.fuzz import sanitized
from tests.fuzz.target import in_time

AGAIN = "KVABR_FUZZ_AGAIN"
"""Variable with the command that starts this process again, which libFuzzer does to minimise a corpus."""


def main(name: str, options: list[str]) -> None:
    """Feed a target until libFuzzer is done."""
    import atheris

    sanitized.load()
    with atheris.instrument_imports(include=["kvabr", "tomllib"]):
        from tests.fuzz.registry import TARGETS

        target = TARGETS[name]
        for data in target.valid():
            target.take(data)  # so that what is imported late is instrumented, too

    def take(data: bytes) -> None:
        with in_time():
            target.take(data)

    atheris.Setup([os.environ.get(AGAIN, sys.argv[0]), *options], take)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
