"""Codecs by name, and those of installed packages."""

from importlib.metadata import EntryPoint

import pytest
import torch

from kvabr.codec import registry
from kvabr.codec.base import GroupContext
from kvabr.codec.cast import Fp16
from kvabr.codec.group import decode_group, encode_group
from kvabr.types.errors import FormatError
from kvabr.types.naming import LEVELS
from tests.kvdata import cache, spec


class Louder(Fp16):
    name = "Louder"


class Slash(Fp16):
    name = "no/slash"


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
    entry = EntryPoint(name, f"tests.codec.test_registry:{value}", "kvabr.codecs")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "kvabr.codecs" else [])


def test_a_plug_in_is_a_track_like_any_other(monkeypatch):
    install(monkeypatch, "Louder", "Louder")
    assert registry.names()[: len(LEVELS)] == LEVELS
    assert "Louder" in registry.names()[len(LEVELS) :]
    shape, out = spec(1, 1, 32), torch.empty(spec(1, 1, 32).shape(9))
    context = GroupContext(shape, 0, 9)
    frame = encode_group(cache(shape, 9), "Louder", context, "ab" * 32, 0)
    decode_group(frame, "Louder", context, "ab" * 32, 0, out)
    assert torch.equal(out, cache(shape, 9).half().float())


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
