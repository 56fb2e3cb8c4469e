"""The matrix that the memory of every engine passes: what a play writes is what a publication reads."""

import pytest
import torch

from kvabr.codec.block_slots import TensorPlace
from kvabr.engines.layouts import BlockLayout
from kvabr.engines.lmcache.chunks import as_kv
from kvabr.engines.lmcache.chunks import spec_of as chunk_spec
from kvabr.engines.sglang.pages import LAYOUTS, page_view
from kvabr.types.errors import FormatError
from tests.engines.paging import paged_blocks

LAYERS, HEADS, DIM, TOKENS = 3, 2, 4, 16


class View(TensorPlace):
    """Memory that plays are decoded into, and publications read as it is."""

    def read(self, out):
        out.copy_(self.whole)


def blocks(layout):
    layers = [torch.full((9, HEADS, 4, 2 * DIM), float("nan"), dtype=torch.bfloat16) for _ in range(LAYERS)]
    return paged_blocks(layers, (7, 0, 3, 8), layout)


def chunk():
    spec = chunk_spec("model", (LAYERS, 2, TOKENS, HEADS, DIM), torch.float16)
    return View(as_kv(torch.zeros(2, LAYERS, TOKENS, HEADS * DIM, dtype=torch.float16), spec))


def page(layout):
    shape = {
        "layer_first": (2, LAYERS, 4 * TOKENS, HEADS, DIM),
        "page_first": (2, 4 * TOKENS, LAYERS, HEADS, DIM),
        "page_first_direct": (2, 4, LAYERS, TOKENS, HEADS, DIM),
        "page_head": (2, 4, HEADS, TOKENS, LAYERS, DIM),
    }[layout]
    return View(page_view(torch.zeros(shape), layout, 2 * TOKENS, TOKENS))


PLACES = {
    **{f"blocks, {layout.value}": blocks(layout) for layout in BlockLayout},
    "a chunk of LMCache": chunk(),
    **{f"a page of SGLang, {layout}": page(layout) for layout in LAYOUTS},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_is_written_is_read(place):
    kv = torch.randint(-120, 120, (LAYERS, 2, HEADS, TOKENS, DIM)).float()
    place.write(kv)
    for dtype in (torch.float32, torch.float16):
        out = torch.full(kv.shape, float("nan"), dtype=dtype)
        place.read(out)
        assert torch.equal(out.float(), kv)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_another_shape_is_refused(place):
    for shape in (
        (LAYERS, 2, HEADS, TOKENS - 4, DIM),
        (LAYERS, 2, HEADS + 1, TOKENS, DIM),
        (LAYERS, 2, 1, TOKENS, DIM),
    ):
        if isinstance(place, View):
            assert not place.fits(shape)
            continue
        with pytest.raises(FormatError, match="the shape must be"):
            place.write(torch.zeros(shape))
        with pytest.raises(FormatError, match="the shape must be"):
            place.read(torch.zeros(shape))
