"""How fast the machine decodes: measured on a clock that counts, kept in a file, and never believed if it cannot be."""

import asyncio
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvabr.client import memory
from kvabr.client.async_client import AsyncClient
from kvabr.client.decode_speeds import complete, measure
from kvabr.client.memory import MAX_MODELS, SCHEMA, DecodeSpeeds, digest, speeds_key, this_machine
from kvabr.player.groups import DecodeRates
from kvabr.types.catalog import Catalog
from tests.catalogs import catalog
from tests.client.playing import play
from tests.client.virtual import virtual
from tests.toymodel import SPEC, prompt

PER_TOKEN = {"Int8": 2e-4, "AC-5x": 5e-4}


def counting(step_s: float = 0.001) -> Any:
    """A clock that advances whenever it is read."""
    return itertools.count(0.0, step_s).__next__


def unmeasured(offer: Catalog, **changes: float) -> Catalog:
    return replace(offer, tracks=tuple(replace(t, decode_s=changes.get(t.name, 0.0)) for t in offer.tracks))


def written(path: Path, models: Any = None, **changes: Any) -> Path:
    """A file as `DecodeSpeeds.measure` would have written it, but for ``changes``."""
    models = {speeds_key(catalog()): PER_TOKEN} if models is None else models
    whole = {"schema": SCHEMA, "machine": this_machine(), "sha256": digest(models), "decode_rates": models, **changes}
    path.write_text(json.dumps(whole))
    return path


def test_every_family_that_can_be_decoded_is_measured() -> None:
    offer = catalog(2, layered=True)  # its layers are no built-in tracks, and AC-5x has no profile
    found = measure(offer, None, clock=counting())
    assert set(found) == {"FP16", "BF16", "FP8", "Int8", "FP4", "Int4"}
    assert list(found.values()) == pytest.approx([0.001 / 128] * 6)


@pytest.mark.parametrize("clock", [itertools.repeat(5.0).__next__, itertools.count(0.0, -1.0).__next__])
def test_a_clock_that_stands_still_or_runs_back_measures_nothing(clock: Any) -> None:
    assert measure(catalog(2), None, clock=clock) == {}


def test_what_was_not_measured_takes_what_its_family_takes_longer() -> None:
    offer = catalog(2, layered=True)
    tracks = [*offer.tracks, replace(offer.track("base"), name="AC-mine", refines=None, decode_s=0.01)]
    found = complete(replace(offer, tracks=tuple(tracks)), PER_TOKEN)
    assert found["Int8"] == pytest.approx(128 * 2e-4)
    assert found["AC-mine"] == pytest.approx(0.01 * (128 * 5e-4) / 0.004)
    assert "FP16" not in found
    assert complete(unmeasured(offer), PER_TOKEN) == {"Int8": pytest.approx(0.0256), "AC-5x": pytest.approx(0.064)}


@pytest.mark.parametrize("said", [5e-324, 1e-300, 1e9])
def test_catalogs_that_say_nonsense_make_no_rate_that_cannot_be(said: float) -> None:
    offer = catalog(2)
    tracks = [replace(offer.track("AC-5x"), decode_s=said), replace(offer.track("AC-5x"), name="AC-mine", decode_s=1.0)]
    offer = replace(offer, tracks=(*(each for each in offer.tracks if each.name != "AC-5x"), *tracks))
    found = complete(offer, {**PER_TOKEN, "AC-5x": 5e-4})
    assert all(0 < seconds < math.inf for seconds in found.values())
    DecodeRates(offer, found)


def test_a_measurement_is_there_in_the_next_process(tmp_path: Path) -> None:
    path, offer = tmp_path / "deeper" / "rates.json", catalog(2)
    speeds = DecodeSpeeds(path)
    assert speeds.lacks(offer)
    assert speeds.rates(offer).seconds("Int8") == 0.002  # the catalog's until then
    speeds.measure(offer, None)
    assert not speeds.lacks(offer)
    again = DecodeSpeeds(path)
    assert not again.lacks(offer)
    assert again.rates(offer).seconds("FP16") == speeds.rates(offer).seconds("FP16") > 0
    assert again.lacks(replace(offer, profile="0" * 64))
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]
    assert [each.name for each in path.parent.iterdir() if each.suffix != ".lock"] == [path.name]


@pytest.mark.parametrize(
    ("name", "value"),
    [("host", "another"), ("processor", "a slower one"), ("kvabr", "0.0.1"), ("torch", "1.0"), ("threads", 4096)],
)
def test_another_machine_or_version_is_measured_anew(tmp_path: Path, name: str, value: object) -> None:
    path = written(tmp_path / "rates.json", machine=this_machine() | {name: value})
    speeds = DecodeSpeeds(path)
    assert speeds.lacks(catalog())
    assert speeds.rates(catalog()).seconds("Int8") == 0.002
    speeds.measure(catalog(2), None)
    assert json.loads(path.read_text())["machine"] == this_machine()
    assert not DecodeSpeeds(path).lacks(catalog())


@pytest.mark.parametrize("seconds", [0.0, -1e-4, math.nan, math.inf, 1e6, 0, True, "fast", None, []])
def test_a_rate_that_cannot_be_is_measured_anew(tmp_path: Path, seconds: object) -> None:
    good = "other::none"
    models = {speeds_key(catalog()): PER_TOKEN | {"Int4": seconds}, good: PER_TOKEN}
    path = written(tmp_path / "rates.json", models)
    speeds = DecodeSpeeds(path)
    assert speeds.lacks(catalog())
    assert speeds.rates(catalog()).seconds("Int8") == 0.002
    speeds.measure(catalog(2), None)
    kept = json.loads(path.read_text())["decode_rates"]
    assert kept[good] == PER_TOKEN
    assert all(each > 0 for each in kept[speeds_key(catalog())].values())


def test_the_file_is_bounded(tmp_path: Path) -> None:
    models = {f"{index}::path": PER_TOKEN for index in range(MAX_MODELS)}
    path = written(tmp_path / "rates.json", models)
    DecodeSpeeds(path).measure(catalog(2), None)
    kept = json.loads(path.read_text())["decode_rates"]
    assert len(kept) == MAX_MODELS
    assert "0::path" not in kept
    assert DecodeSpeeds(written(path, models | {"one::more": PER_TOKEN})).lacks(catalog())


@virtual
async def test_the_first_play_of_a_model_has_it_measured(origin: Any, tmp_path: Path) -> None:
    file = tmp_path / "decode-rates.json"
    async with origin() as link, AsyncClient(cache=tmp_path) as client:
        await play(client, prompt(70).tokens, peer=link, deadline=2.0, spec=SPEC)
        for _ in range(100):  # of a clock that waits for threads
            await asyncio.sleep(0.01)
        assert file.exists()
    (measured,) = json.loads(file.read_text())["decode_rates"].values()
    assert set(measured) <= {"FP16", "Int8", "Int4"}


def test_a_gpu_is_measured_without_a_file_and_until_then_taken_for_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    device, offer = torch.device("cuda", 0), catalog(2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    speeds = DecodeSpeeds()
    assert not speeds.lacks(offer)
    assert speeds.lacks(offer, device)
    assert speeds.rates(offer, device).seconds("Int8") == pytest.approx(0.002 / 32)
    monkeypatch.setattr(memory, "measure", lambda *_, **__: {"Int8": 1e-6, "batch Int8": 0.003})
    speeds.measure(offer, None, device)
    assert not speeds.lacks(offer, device)
    rates = speeds.rates(offer, device)
    assert (rates.seconds("Int8"), rates.latency("Int8")) == (pytest.approx(128e-6), 0.003)
    assert speeds.rates(offer).seconds("Int8") == 0.002  # the processor's are others
