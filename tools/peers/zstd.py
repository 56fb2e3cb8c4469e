"""zstd as a peer of `kvabr bench`: runs in its own environment and never sees kvabr.

Reads requests as JSON lines, answers each with one. The payloads of a cache's groups come as a safetensors file of
byte arrays named 0, 1, 2 and so on.
"""

from __future__ import annotations

import json
import sys
import time

import zstandard
from safetensors.numpy import load_file


def answer(request: dict) -> dict:
    """Compress, decompress, compare, time."""
    payloads = load_file(request["in"])
    level, width = int(request["options"]["level"]), int(request["options"]["width"])
    sizes, encode_s, decode_s = [], [], []
    for index in range(len(payloads)):
        data = payloads[str(index)]
        start = time.perf_counter()
        # The bytes of a number apart: exponents are alike, mantissas are not.
        whole = len(data) // width * width
        apart = data[:whole].reshape(-1, width).T.tobytes() + data[whole:].tobytes()
        packed = zstandard.ZstdCompressor(level=level).compress(apart)
        encode_s.append(time.perf_counter() - start)
        sizes.append(len(packed))
        start = time.perf_counter()
        back = zstandard.ZstdDecompressor().decompress(packed)
        decode_s.append(time.perf_counter() - start)
        if back != apart:
            raise ValueError("zstd did not give back what it was given")
    return {"bytes": sizes, "encode_s": encode_s, "decode_s": decode_s}


for line in sys.stdin:
    try:
        said = answer(json.loads(line))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told
        said = {"error": repr(error)}
    print(json.dumps(said), flush=True)
