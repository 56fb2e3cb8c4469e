"""The coder of the AC tracks in integer arithmetic, with AVX2 and in portable C, to the same bits.

`streams` describes the format; `coder` selects a path.
"""

import sys

if sys.byteorder != "little":
    raise ImportError("kvabr codes and decodes on little-endian machines only; this one is big-endian")
