"""`python -m kvabr` is the `kvabr` command."""

import sys

from kvabr.cli.main import main

sys.exit(main())
