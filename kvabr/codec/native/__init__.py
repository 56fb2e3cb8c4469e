"""The coder of the AC tracks: indices to bytes and back, and indices to a cache, in integer arithmetic.

`streams` describes the format. The extension module has it with AVX2 and in portable C, to the same bits; `coder` takes
the best available path.
"""

import sys

if sys.byteorder != "little":
    raise ImportError("kvabr codes and decodes on little-endian machines only; this one is big-endian")
