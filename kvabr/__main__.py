"""`python -m kvabr` is the `kvabr` command."""

import sys

from kvabr.cli import main

sys.exit(main())
