"""The coder of the AC tracks: indices to bytes and back, and indices to a cache, in integer arithmetic.

`reference` defines the format in NumPy. The extension module implements it a thousand times faster, with the best path
that the processor supports, and produces the same bits. `coder` chooses between them. Nothing here knows tracks,
containers or profile files.
"""

import sys

if sys.byteorder != "little":
    raise ImportError("kvabr codes and decodes on little-endian machines only; this one is big-endian")
