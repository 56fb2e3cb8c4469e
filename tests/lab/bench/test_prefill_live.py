"""Producer, origin, link and decoder as processes, with a tiny model; and the picture of such a play."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from kvabr.types.errors import KvabrError
from kvabr_lab.bench.prefill_live import Decoded, Decoder, Link, Prefill, PrefillJob, PrefillProducer, picture, run
from kvabr_lab.live.origin import LiveOrigin
from kvabr_lab.live.shaper import Shaper
from tests import tinymodels

IDS = tuple(index * 7 % 256 for index in range(600))


@pytest.mark.model
@pytest.mark.process
@pytest.mark.slow
def test_a_cache_is_played_while_another_process_computes_it(tmp_path):
    model, assets = tinymodels.save(tmp_path / "tiny"), tmp_path / "assets"
    assets.mkdir()
    with (
        PrefillProducer(str(model), assets, ("FP16", "Int4"), IDS[:200]) as producer,
        LiveOrigin(str(assets), "aioquic", follow=True) as origin,
        Shaper(origin.address) as shaper,
        Decoder(f"moqt://127.0.0.1:{shaper.address[1]}/", origin.fingerprint, "aioquic", producer.spec) as decoder,
    ):
        Link(50.0, 0.02).begin(shaper)
        for kind, tokens in (("live", IDS[1:513]), ("end", IDS[2:514])):
            prefill, (decoded,) = run(PrefillJob(tokens, kind, 128, 300.0), producer, [decoder])
            assert [done for done, _ in prefill.runs] == [128, 256, 384, 512]
            assert len(prefill.told_s) == len(prefill.whole_s) == (4 if kind == "live" else 0)
            assert all(base_s <= all_s for base_s, all_s in zip(prefill.told_s, prefill.whole_s, strict=True))
            assert 0 <= prefill.idle_s <= prefill.encoding_s
            assert len(decoded.coverage) == len(decoded.groups_s) == 4
            assert set(decoded.coverage) <= {"FP16", "Int4"}
            assert decoded.ready_s > prefill.ended_s
            assert decoded.bytes_fetched > 0
        prefill, played = run(PrefillJob(IDS[3:515], "alone"), producer, [decoder])
        assert played == []
        with pytest.raises(KvabrError, match="not published: known"):
            run(PrefillJob(IDS[1:513]), producer)


def test_the_picture_has_a_mark_for_each_run_and_group():
    prefill = Prefill(10.0, ((256, 11.0), (300, 11.5)), (11.1, 11.15, 11.6))
    decoded = Decoded(10.0, 11.8, (11.2, 11.3, 11.75), ("AC-L2", "AC-L1", "AC-L0"), 0.01, 1000)
    drawn = ET.fromstring(picture(prefill, decoded, "300 tokens"))  # noqa: S314  # our own
    marks = [each.get("class") for each in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert [marks.count(kind) for kind in "pnd"] == [2, 3, 3]
    said = [text for each in drawn.iter() if (text := each.text)]
    assert "300 tokens" in said
    assert [text for text in said if text.startswith("height")] == ["height: tokens", *["height: groups"] * 2]
    assert (said.count("300"), said.count("3")) == (1, 2)  # what a bar of full height stands for
    assert "1.80 s: in place 300 ms after the last token" in said
    assert "group 2 on AC-L0: 1.750 s" in said
