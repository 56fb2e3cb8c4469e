"""The coder of the AC tracks: indices to bytes and back, and from indices to a cache, by integer arithmetic.

`reference` says in NumPy what the format is; the extension module does the same a thousand times faster, by the best
path that the processor has, and gives the same bits. `coder` picks. `analysis` is the encoder's transform before that,
where nothing has to be exact to the bit. No tracks, no containers, no profiles' files here.
"""

import sys

if sys.byteorder != "little":
    raise ImportError("kvabr codes and decodes on little-endian machines only; this one is big-endian")
