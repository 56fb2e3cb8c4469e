"""`python -m kvabr` and the script `kvabr`: the command line, which Ctrl-C can interrupt even during imports."""

import os
import sys


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from kvabr.cli.main import main as command  # noqa: PLC0415 - Ctrl-C may come while it is imported

        return command()
    except KeyboardInterrupt:  # afterwards it answers Ctrl-C itself
        sys.stderr.write("kvabr: interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # Python would end by the signal, since the exception has passed through an import


if __name__ == "__main__":
    sys.exit(main())
