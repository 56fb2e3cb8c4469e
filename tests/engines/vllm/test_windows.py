"""Groups that leave windows are kept for publishing: by steps in the scheduler, by digest in a worker. No vLLM."""

from types import SimpleNamespace

import torch

from kvabr.engines.vllm.caches import EngineCaches, Pages
from kvabr.engines.vllm.windows import Completed, WindowCache
from kvabr.types.kv import LayerClass

CACHES = EngineCaches(
    (LayerClass("window", (0,), 1, 4, 4, "float16", window=16), LayerClass("full", (1,), 1, 4, 4, "float16")),
    (Pages(0, 0, 8, ("0",), (0,), passing=True), Pages(1, 1, 8, ("1",), (0,))),
)
NAMES = tuple("abcdefgh")


def completed(prompt=70):
    made = Completed(CACHES, 16, lambda request: NAMES[: prompt // 16] if request.wanted else ())
    request = SimpleNamespace(request_id="r", num_computed_tokens=0, num_prompt_tokens=prompt, wanted=True)
    made.arrived(request)
    return made, request


def test_what_vllm_has_dropped_before_cannot_be_kept():
    made, request = completed()
    request.num_computed_tokens = 8
    (keep,) = made.step({"r": 56}, lambda _: ([0, 2, 3, 4, 5, 6, 7, 8], [0] * 8))
    assert (keep.chunks, keep.blocks) == (("b", "c", "d"), ((3, 4, 5, 6, 7, 8), ()))
    assert made.step({"r": 8}, lambda _: ([0] * 8, [0] * 8)) == []


def test_memory_is_bounded_and_what_was_used_last_stays():
    one = torch.zeros(1, 2, 1, 16, 4)
    kept = WindowCache(3 * one.nbytes)
    for name in "abc":
        kept.keep(name, [one + ord(name)])
    kept.keep("a", [one])  # the first one stays as it is
    assert not kept.lacks("a")
    kept.keep("d", [one])
    assert kept.lacks("b")
    assert kept.take("ab") is None
    ((first, second),) = kept.take("ca")
    assert (float(first.max()), float(second.max())) == (ord("c"), ord("a"))
    assert kept.take("") == ()
    nothing = WindowCache(0)
    nothing.keep("a", [one])
    assert nothing.lacks("a")
