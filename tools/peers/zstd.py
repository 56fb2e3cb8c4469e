"""zstd as a peer of `kvabr bench`; runs in its own environment, without kvabr.

Reads and answers JSON lines. Payloads arrive as a safetensors file of byte arrays named 0, 1, 2 and so on.
"""

from __future__ import annotations

import json
import sys
import time

import zstandard
from safetensors.numpy import load_file


def answer(request: dict) -> dict:
    """Compress, decompress, compare and time one request."""
    payloads = load_file(request["in"])
    level, width = int(request["options"]["level"]), int(request["options"]["width"])
    sizes, encode_s, decode_s = [], [], []
    for index in range(len(payloads)):
        data = payloads[str(index)]
        start = time.perf_counter()
        # Group bytes of equal significance: exponents are similar, mantissas are not.
        whole = len(data) // width * width
        apart = data[:whole].reshape(-1, width).T.tobytes() + data[whole:].tobytes()
        packed = zstandard.ZstdCompressor(level=level).compress(apart)
        encode_s.append(time.perf_counter() - start)
        sizes.append(len(packed))
        start = time.perf_counter()
        back = zstandard.ZstdDecompressor().decompress(packed)
        decode_s.append(time.perf_counter() - start)
        if back != apart:
            raise ValueError("zstd did not reproduce its input")
    return {"bytes": sizes, "encode_s": encode_s, "decode_s": decode_s}


for line in sys.stdin:
    try:
        said = answer(json.loads(line))
    except Exception as error:  # noqa: BLE001  # reported to the bench
        said = {"error": repr(error)}
    print(json.dumps(said), flush=True)
