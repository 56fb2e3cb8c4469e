"""What is shown of plays of several layer classes: groups have the names of their classes."""

import json
from dataclasses import replace

import pytest

from kvabr.cli.main import main
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.report.digest import digest
from kvabr.replay.run import Matrix, replay
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.units import count_of
from tests.client.classes import HYBRID, INDEXED, SLIDING, published

TOKENS = list(range(150))


def steady(rate):
    return Trace("test/steady", "test", (0.0,), (rate,), 60.0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return published(tmp_path_factory.mktemp("asset"), SLIDING, TOKENS)


@pytest.fixture
def catalog(library):
    return library.assets[0].catalog


def test_the_report_names_units(catalog):
    matrix = Matrix(catalog, (steady(2e4),), ("anytime", "fixed:FP16"), ReplayOptions(2.0), timelines=1)
    report = replay(matrix, jobs=1)
    names = [group["unit"] for group in report.result["runs"][0]["groups"]]
    play = catalog.to_play
    assert names == list(play.titles)
    assert "window40 #9" in names
    data = digest(report.result, report.timelines, [track.name for track in play.tracks])
    assert data["units"] == names


@pytest.mark.parametrize("spec", [SLIDING, INDEXED], ids=lambda spec: spec.model)
@pytest.mark.parametrize("policy", ["anytime", "cheapfirst", "cachegen", "fixed:Int8", "oracle"])
def test_simulated_plays_with_an_engine_never_beat_the_bound(tmp_path, spec, policy):
    catalog = published(tmp_path, spec, TOKENS).assets[0].catalog
    whole = catalog.to_play.track("FP16").total_bytes
    for share in (0.1, 0.5, 2.0):
        options = ReplayOptions(2.0, cost=PrefillCost.from_rate(100.0))
        run = Experiment(catalog, options).play(steady(share * whole / 2.0), 0.0, policy).run
        assert run["gave_up"] is None
        assert run["regret"] is None or run["regret"] > -1e-9


def test_inspect_shows_classes_and_what_a_play_needs(library, tmp_path, capsys):
    asset = library.assets[0]
    out = tmp_path / "facts.json"
    assert main(["inspect", str(asset.location), "--json", str(out)]) == 0
    told = capsys.readouterr().out
    assert "150 tokens in 10 groups of 16; 40 groups in 4 layer classes" in told
    assert "latent: 1 layer, 1 vector of 12 per token, bfloat16" in told
    assert "window40: 2 layers, 2 KV heads of 8 and 4, float16; " in told
    assert "prompts can share" not in told
    assert "a play of all tokens needs" in told
    facts = json.loads(out.read_text())
    assert facts["classes"] == list(SLIDING.names)
    assert facts["needed_groups"] == asset.catalog.to_play.groups


@pytest.mark.parametrize(
    ("interval", "ends"), [(None, "150"), (48, "48, 96, 144, 150"), (16, "16, 32, 48, 64, 80, 96, 112, 128, ..., 150")]
)
def test_inspect_tells_where_there_are_snapshots(tmp_path, capsys, interval, ends):
    spec = replace(HYBRID, classes=(*HYBRID.classes[:2], replace(HYBRID.classes[2], interval=interval)))
    catalog = published(tmp_path, HYBRID, TOKENS).assets[0].catalog.to_json()
    count = count_of(spec, len(TOKENS))
    tracks = [
        {**track, **{name: track[name][:1] * count for name in ("bytes", "loss", "digests")}}
        for track in catalog["tracks"]
    ]
    path = tmp_path / "catalog.json"
    path.write_text(json.dumps(catalog | {"spec": spec.to_json(), "tracks": tracks}))
    assert main(["inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"prompts can share its first {ends} tokens, where snapshots of its states are stored" in told
    assert "state: 1 layer, 2 states of 6 x 5, float16" in told
