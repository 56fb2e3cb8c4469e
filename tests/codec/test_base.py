"""Codecs by name, and those of installed packages."""

import importlib.metadata
from importlib.metadata import EntryPoint

import pytest
import torch

from kvabr.codec import base as registry
from kvabr.codec.base import GroupContext
from kvabr.codec.builtin import PayloadLayout
from kvabr.codec.container import object_spans
from kvabr.codec.floats import Fp16
from kvabr.codec.group import decode_group, encode_group
from kvabr.types.errors import FormatError
from kvabr.types.naming import LEVELS
from tests.kvdata import cache, spec


class Louder(Fp16):
    name = "Louder"


class Slash(Fp16):
    name = "no/slash"


class Paired(Fp16):
    """Its payloads are cut at every second token."""

    name = "Paired"

    def layout(self, spec, tokens):
        single = super().layout(spec, tokens)
        return PayloadLayout(tokens, 0, 2, 2 * single.unit_bytes, (2 - tokens % 2) * single.unit_bytes)


class Broken(Fp16):
    name = "Broken"

    def __init__(self):
        raise OSError("its library is missing")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


def install(monkeypatch, name, value):
    entry = EntryPoint(name, f"tests.codec.test_base:{value}", "kvabr.codecs")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "kvabr.codecs" else [])


def test_a_plug_in_is_a_track_like_any_other(monkeypatch):
    install(monkeypatch, "Louder", "Louder")
    assert registry.names()[: len(LEVELS)] == LEVELS
    assert "Louder" in registry.names()[len(LEVELS) :]
    shape, out = spec(1, 1, 32), torch.empty(spec(1, 1, 32).shape(9))
    context = GroupContext(shape, 0, 9)
    frame = encode_group(cache(shape, 9), "Louder", context, "ab" * 32, 0)
    decode_group(frame, "Louder", context, "ab" * 32, 0, out)
    assert torch.equal(out, cache(shape, 9).half().float())


def test_a_plug_in_is_cut_where_it_says(monkeypatch):
    """One file is enough: the class is the only place that knows the layout."""
    install(monkeypatch, "Paired", "Paired")
    shape = spec(32, 8, 128, rope=None)
    frame = encode_group(cache(shape, 9), "Paired", GroupContext(shape, 128, 9), "ab" * 32, 1)
    assert [span.object_id for span in object_spans(shape, "Paired", 128, 9, len(frame))] == [128, 130, 132, 134, 136]


@pytest.mark.parametrize(
    ("name", "value"), [("Broken", "Broken"), ("Louder", "Missing"), ("Other", "Louder"), ("x", "LEVELS")]
)
def test_a_plug_in_that_is_none_is_named(monkeypatch, name, value):
    install(monkeypatch, name, value)
    with pytest.raises(FormatError, match=f"plug-in {name}"):
        registry.codec(name)
    # The draft's levels need no plug-in.
    assert registry.codec("Int4").name == "Int4"


def test_registered_codecs_need_a_name_that_can_be_a_track():
    registry.register(Louder())
    assert registry.codec("Louder").name == "Louder"
    with pytest.raises(FormatError, match="no/slash"):
        registry.register(Slash())
    with pytest.raises(FormatError, match="AC-5x"):
        registry.codec("MP3")
