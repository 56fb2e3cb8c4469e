"""The coder of the AC tracks in integer arithmetic, with AVX2 and in portable C, with identical bits.

`streams` describes the format; `coder` selects the implementation.
"""

import sys

if sys.byteorder != "little":
    raise ImportError("kvabr codes and decodes on little-endian machines only; this one is big-endian")
