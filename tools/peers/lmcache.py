"""LMCache's CacheGen codec as a peer of `kvabr bench`; runs in its own environment, without kvabr.

Reads and answers JSON lines. Caches are exchanged as safetensors files, [layer, K/V, head, token, dim]. Times cover
LMCache's serializer and deserializer, on a tensor that is already in LMCache's layout.
"""

from __future__ import annotations

import json
import os
import sys
import time

# Keep standard output for answers: LMCache's own output goes to standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
EVERY = os.sched_getaffinity(0)

import torch  # noqa: E402
from lmcache.storage_backend.serde import cachegen_decoder as decoder  # noqa: E402
from lmcache.storage_backend.serde.cachegen_basics import CacheGenGPUEncoderOutput  # noqa: E402
from lmcache.storage_backend.serde.cachegen_encoder import encode_function  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

THREADS = torch.get_num_threads()


def levels(runs: list[list[int]], layers: int) -> torch.Tensor:
    """Return every layer's quantiser levels, from runs ``[end layer, levels]``."""
    out, first = torch.zeros(layers), 0
    for end, count in runs:
        out[first : min(end, layers)] = count
        first = min(end, layers)
    return out


def encode(kv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bytes:
    """Like CacheGenSerializer.to_bytes: [layer, K/V, token, head, dim] to bytes."""
    return encode_function(kv, None, keys, values, kv.shape[2]).to_bytes()


def decode(data: bytes, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Like CacheGenDeserializer.from_bytes. LMCache unpickles here; the bytes are ours."""
    coded = CacheGenGPUEncoderOutput.from_bytes(data)
    layers, tokens = coded.max_tensors_key.shape[:2]
    room = torch.zeros((tokens, coded.cdf.shape[0] * coded.cdf.shape[1]), dtype=torch.uint8)
    key, value = decoder.decode_function_gpu(coded.cdf, coded.data_chunks, layers, tokens, room)
    key = decoder.do_dequantize(key, keys, coded.max_tensors_key)
    value = decoder.do_dequantize(value, values, coded.max_tensors_value)
    both = torch.stack([key, value]).reshape(2, layers, tokens, coded.num_heads, coded.head_size)
    return both.permute(1, 0, 2, 3, 4).to(dtype)


def timed(work):  # noqa: ANN001, ANN201
    """Return the result of a call, its wall time, and its CPU time, in seconds."""
    start, spent = time.perf_counter(), time.process_time()
    made = work()
    return made, time.perf_counter() - start, time.process_time() - spent


def answer(request: dict) -> dict:
    """Encode, decode and time one request."""
    # The codec's kernels start one thread per processor; with a single processor the threads share it.
    os.sched_setaffinity(0, sorted(EVERY)[: request.get("processors") or len(EVERY)])
    torch.set_num_threads(min(THREADS, request.get("processors") or THREADS))
    dtype = getattr(torch, request.get("dtype", "float16"))
    cache = load_file(request["in"])["kv"].to(dtype)
    options = request["options"]
    keys, values = (levels(options[name], cache.shape[0]) for name in ("keys", "values"))
    out = torch.empty_like(cache)
    sizes, encode_s, decode_s = [], [], []
    for first, end in request["groups"]:
        kv = cache[:, :, :, first:end].transpose(2, 3).contiguous()
        (data, *spent) = timed(lambda kv=kv: encode(kv, keys, values))
        encode_s.append(spent)
        sizes.append(len(data))
        if request["out"] is not None or request.get("decode"):
            (back, *spent) = timed(lambda data=data: decode(data, keys, values, dtype))
            decode_s.append(spent)
            out[:, :, :, first:end] = back.transpose(2, 3)
    if request["out"] is not None:
        save_file({"kv": out}, request["out"])
    return {"bytes": sizes, "encode_s": encode_s, "decode_s": decode_s}


for line in sys.stdin:
    try:
        said = answer(json.loads(line))
    except Exception as error:  # noqa: BLE001  # reported to the bench
        said = {"error": repr(error)}
    print(json.dumps(said), file=answers, flush=True)
