"""Pages in the layouts of HiCache's host pool; none of it needs SGLang."""

import pytest
import torch

from kvabr.engines.sglang.pages import LATENT_LAYOUTS, LAYOUTS, page_view, read_settings
from kvabr.types.errors import FormatError, UsageError

L, T, P, H, D = 3, 32, 8, 2, 4
SHAPES = {
    "layer_first": (2, L, T, H, D),
    "page_first": (2, T, L, H, D),
    "page_first_direct": (2, T // P, L, P, H, D),
    "page_head": (2, T // P, H, P, L, D),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_is_where_it_belongs(layout):
    pool = torch.arange(2 * L * T * H * D).reshape(SHAPES[layout])
    page = page_view(pool, layout, 16, P)
    assert page.shape == (L, 2, H, P, D)
    for layer, which, head, token in ((0, 0, 0, 0), (2, 1, 1, 7), (1, 0, 1, 3)):
        place = {
            "layer_first": (which, layer, 16 + token, head),
            "page_first": (which, 16 + token, layer, head),
            "page_first_direct": (which, 2, layer, token, head),
            "page_head": (which, 2, head, token, layer),
        }[layout]
        assert torch.equal(page[layer, which, head, token], pool[place])
        page[layer, which, head, token, 1] = -5
        assert pool[(*place, 1)] == -5


@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
def test_every_latent_is_where_it_belongs(layout):
    shape = {
        "layer_first": (L, T, 1, D),
        "page_first": (T, L, 1, D),
        "page_first_direct": (T // P, L, P, 1, D),
        "page_unified": (T // P, L, P, D),
    }[layout]
    pool = torch.arange(L * T * D).reshape(shape)
    page = page_view(pool, layout, 16, P, latent=True)
    assert page.shape == (L, 1, 1, P, D)
    for layer, token in ((0, 0), (2, 7), (1, 3)):
        place = {
            "layer_first": (layer, 16 + token, 0),
            "page_first": (16 + token, layer, 0),
            "page_first_direct": (2, layer, token, 0),
            "page_unified": (2, layer, token),
        }[layout]
        assert torch.equal(page[layer, 0, 0, token], pool[place])
        page[layer, 0, 0, token, 1] = -5
        assert pool[(*place, 1)] == -5


def test_wrong_pages():
    pool = torch.zeros(SHAPES["layer_first"])
    with pytest.raises(FormatError, match="no page of 8 tokens begins"):
        page_view(pool, "layer_first", 3, P)
    with pytest.raises(FormatError, match="page_unified"):
        page_view(pool, "page_unified", 0, P)
    with pytest.raises(FormatError, match="page_head"):
        page_view(pool[0], "page_head", 0, P, latent=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, '"kvabr" is missing'),
        ({"kvabr": "moqt://x"}, '"kvabr" is missing'),
        ({"kvabr": {}}, "set url to fetch caches"),
        ({"kvabr": {"uri": "moqt://origin.example/"}}, "did you mean 'url'"),
    ],
)
def test_wrong_settings_are_named(given, says):
    with pytest.raises(UsageError, match=says):
        read_settings(given)
