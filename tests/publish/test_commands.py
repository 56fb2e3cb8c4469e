"""`kvabr encode`, `inspect`, `calibrate` and `bench quality`, as a user calls them."""

import json

import pytest

from kvabr.cli.main import main
from kvabr.engines.transformers import publish
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.publish.fusion import FusionLosses
from kvabr.publish.texts import measuring_texts
from kvabr.store.files import NameClaim
from kvabr.store.locations import open_asset
from kvabr.types.cost import PrefillCost
from kvabr.types.naming import LAYERS, chain
from tests import tinymodels
from tests.assets import frame_file
from tests.toymodel import toy_asset


@pytest.fixture
def toy(tmp_path):
    toy_asset(tmp_path / "asset")
    return tmp_path / "asset"


def catalog_file(root):
    """The file of the only catalog in a store."""
    (path,) = (root / "a").iterdir()
    return path


def kvabr(*words):
    return main([str(word) for word in words])


def test_inspect_shows_tracks_groups_and_mixes(toy, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert kvabr("inspect", toy, "--check", "--json", report) == 0
    out = capsys.readouterr().out
    for words in ("FP16", "Int4", "bits/el", "ratio", "predicted", "17 parts: 0 bad"):
        assert words in out
    value = json.loads(report.read_text())
    catalog = open_asset(toy).catalog
    assert (value["schema"], value["command"]) == ("kvabr.result/1", "inspect")
    assert [row["track"] for row in value["tracks"]] == ["FP16", "Int8", "Int4"]
    four = value["tracks"][2]
    assert four["bytes"] == catalog.track("Int4").total_bytes
    assert four["ratio"] == pytest.approx(catalog.fp16_bytes / four["bytes"])
    assert four["bits_per_element"] == pytest.approx(16 / four["ratio"])
    assert four["group_bytes"] == list(catalog.track("Int4").bytes)
    assert len(value["mixes"]) == len(catalog.mixes) >= 6
    assert value["bad"] == []


def test_inspect_check_names_every_bad_part(toy, capsys):
    frame_file(toy, 1, "Int4").unlink()
    path = frame_file(toy, 2, "FP16")
    data, place = path.read_bytes(), open_asset(toy).place(2, "FP16")
    path.write_bytes(data[: place.first] + bytes(place.last - place.first) + data[place.last :])
    (prompt,) = (toy / "private").iterdir()
    prompt.write_text("{}")
    assert kvabr("inspect", toy, "--check") == 1
    captured = capsys.readouterr()
    assert captured.out.count("no such object") == 5  # a pack of all groups
    assert "group 2 of FP16 is damaged" in captured.out
    assert str(prompt) in captured.out
    assert "7 parts cannot be read" in captured.err


def test_encode_finds_mistakes_before_it_loads_a_model(toy, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("words " * 1000)
    (tmp_path / "short.salt").write_bytes(b"fifteen bytes!!")
    (tmp_path / "long.salt").write_bytes(b"x" * 4097)
    base = ("encode", "--text", text, "--model", tmp_path / "no-model")
    salted = (*base, "--tokens", 9, "--out", tmp_path / "o", "--salt-file")
    calibrate, prefill = ("calibrate", "--model", "nowhere", "--out", tmp_path / "o"), ("prefill", *base[1:], "--out")
    cases = [
        ((*salted, tmp_path / "short.salt"), 2, "16 to 4096 random bytes"),
        ((*salted, tmp_path / "long.salt"), 2, "16 to 4096 random bytes"),
        ((*base, "--tokens", 9, "--out", tmp_path / "o", "--prior", toy), 2, "--quick"),
        ((*base, "--tokens", 9, "--out", tmp_path / "o", "--quick", "--passage"), 2, "--quick"),
        ((*base, "--tokens", 9, "--out", tmp_path / "o", "--quick", "--prior", tmp_path / "no"), 2, "no such asset"),
        ((*base, "--tokens", 9, "--out", text / "o"), 1, f"{text} cannot be written"),
        ((*base, "--tokens", 9, "--out", "/proc/sys/o"), 1, "/proc/sys cannot be written"),
        ((*base, "--tokens", 9, "--out", "/proc/o"), 1, "/proc cannot be written (No such file or directory)"),
        ((*base, "--tokens", 9, "--out", text), 1, f"{text}: cannot be written (Not a directory)"),
        ((*prefill, text / "o"), 1, f"{text} cannot be written"),
        ((*prefill, tmp_path / "o", "--edge", "Int4"), 2, "needs --live"),
        ((*prefill, tmp_path / "o", "--live", "--edge", "AC-L1"), 2, "refines AC-L0"),
        ((*prefill, tmp_path / "o"), 1, "no such model"),
        ((*base, "--tokens", 9, "--out", tmp_path / "o", "--fusion", "f.json"), 2, "needs --passage"),
        (
            (*base, "--tokens", 9, "--out", tmp_path / "o", "--passage", "--contexts", 0),
            2,
            "--contexts 0: must be at least 1",
        ),
        ((*base, "--tokens", 9, "--out", tmp_path / "o", "--passage", "--snapshots-every", 128), 2, "recurrent states"),
        ((*calibrate, "--base", "alone"), 2, "needs --blend"),
        ((*calibrate, "--blend", "--contexts", 3), 2, "--contexts is not for --blend"),
        ((*calibrate, "--blend", "--gain"), 2, "--gain is not for --blend"),
        ((*calibrate, "--blend", "--load", "layers"), 2, "--load layers is not for --blend"),
        ((*base, "--tokens", 9, "--out", tmp_path / "o"), 1, "no such model"),
    ]
    for words, status, message in cases:
        assert kvabr(*words) == status
        assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.model
def test_any_directory_is_calibrated_encoded_and_inspected(tmp_path, capsys):
    model = tinymodels.save(tmp_path / "tiny")
    text = tmp_path / "text"
    text.write_text(measuring_texts()["manual"][:3000])
    profile, out = tmp_path / "tiny.safetensors", tmp_path / "asset"
    encode = ("encode", "--text", text, "--tokens", 300, "--continuation", 20, "--model", model, "--out", out)
    assert kvabr(*encode) == 0
    own = open_asset(out).catalog
    assert own.profile_bytes < 100_000  # estimated from the asset, and part of it
    calibrate = ("calibrate", "--model", model, "--text", text, "--context-tokens", 200)
    assert kvabr(*calibrate, "--kept", 8, 8, "--step-scale", 0.5, "--out", profile) == 0
    for wrong in (("--step-scale", 0), ("--step-scale", "inf"), ("--kept", -8, 8)):
        assert kvabr(*calibrate, *wrong, "--out", profile) == 2
    assert kvabr(*calibrate, "--out", tmp_path / "nowhere" / "profile") == 2  # not after minutes of work
    assert kvabr(*encode, "--profile", profile, "--force") == 0
    assert open_asset(out).catalog.profile != own.profile
    assert kvabr("inspect", out, "--check") == 0
    assert open_asset(out).catalog.spec.model.startswith("tiny-")
    # The profile of this model is not one of SmolLM2's shape, and a text file is none at all.
    capsys.readouterr()
    assert kvabr(*encode, "--profile", text, "--force") == 1
    assert "profile" in capsys.readouterr().err
    assert open_asset(out).catalog.tokens == 300
    report = tmp_path / "bench.json"
    bench = ("bench", "quality", "--model", model, "--tokens", 140, "--continuation", 20, "--json", report)
    assert kvabr(*bench, "--text", text, text, "--tracks", "Int4", "FP8") == 0
    value = json.loads(report.read_text())
    assert value["schema"] == "kvabr.bench.quality/1"
    assert [row["track"] for row in value["mean"]] == ["Int4", "FP8"]


@pytest.mark.model
def test_a_salt_changes_every_digest_and_nothing_else(tmp_path):
    model = tinymodels.save(tmp_path / "tiny")
    text, salt = tmp_path / "text", tmp_path / "tenant.salt"
    text.write_text(measuring_texts()["manual"][:3000])
    salt.write_bytes(bytes(range(32)))
    base = ("encode", "--text", text, "--tokens", 140, "--continuation", 20, "--model", model, "--tracks", "Int4")
    assert kvabr(*base, "--out", tmp_path / "plain") == 0
    assert kvabr(*base, "--out", tmp_path / "salted", "--salt-file", salt) == 0
    plain, salted = open_asset(tmp_path / "plain"), open_asset(tmp_path / "salted")
    assert salted.prompt().tokens == plain.prompt().tokens
    spec = salted.catalog.spec
    assert list(salted.catalog.chunks) == chain(
        salted.prompt().tokens, model=spec.model, tokenizer=spec.tokenizer, salt=salt.read_bytes()
    )
    assert not set(salted.catalog.chunks) & set(plain.catalog.chunks)
    assert salted.catalog.tracks[0].bytes == plain.catalog.tracks[0].bytes
    assert kvabr("inspect", tmp_path / "salted", "--check") == 0


@pytest.mark.model
def test_the_real_asset(asset, capsys):
    catalog = asset.catalog
    assert (catalog.groups, catalog.group_tokens(2), catalog.spec.model) == (3, 44, "SmolLM2-135M-Instruct-Q4_1")
    value = json.loads((asset.store.folder.parent / "encode.json").read_text())
    rows = {row["track"]: row for row in value["tracks"]}
    assert set(rows) >= {"FP16", "BF16", "FP8", "Int8", "Int4", "AC-5x", *LAYERS}
    for name, bits in (("FP16", 16), ("BF16", 16), ("FP8", 8), ("Int8", 8), ("Int4", 4)):
        size = catalog.track(name).bytes[0] - 200  # what frames it is no part of the weight
        assert size <= 128 * 11_520 * bits * 1.0625 / 8 < catalog.track(name).bytes[0] * 1.0625, name
    assert rows["AC-5x"]["ratio"] > 4.5  # what is kept aside weighs more in a prompt this short
    assert rows["AC-L0"]["ratio"] > 30
    assert rows["FP16"]["kl"] < 1e-5
    assert rows["Int8"]["kl"] < 1e-3
    assert abs(rows["Int8"]["dnll"]) < 0.005
    assert rows["AC-5x"]["kl"] < 0.003
    losses = [rows[layer]["kl"] for layer in LAYERS]
    assert losses == sorted(losses, reverse=True)
    assert all(row["top1"] > 0.8 for row in rows.values() if row["track"] != "AC-L0")
    assert catalog.prefill is not None
    assert kvabr("inspect", asset.store.folder, "--check") == 0
    assert "32 parts: 0 bad" in capsys.readouterr().out


@pytest.mark.model
def test_a_text_that_is_too_short_says_how_much_there_is(tmp_path, capsys):
    model = tinymodels.save(tmp_path / "tiny")
    text = tmp_path / "text"
    text.write_text("x" * 150)
    words = ("encode", "--text", text, "--model", model, "--out", tmp_path / "o", "--tracks", "Int4")
    assert kvabr(*words, "--tokens", 100) == 2
    assert "the text has 150 tokens, but 100 and 128 of continuation" in capsys.readouterr().err
    text.write_text("x" * 700)
    assert kvabr(*words, "--tokens", 600, "--continuation", 41) == 2
    assert "(640): give at most --tokens 599" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_a_passage_is_encoded_and_inspected(tmp_path, capsys):
    model, out, report = tinymodels.save(tmp_path / "model"), tmp_path / "passage", tmp_path / "report.json"
    text = tmp_path / "text.txt"
    text.write_text("Some words about a passage that may be used anywhere. " * 8)
    words = ("encode", "--passage", "--text", text, "--tokens", 150, "--continuation", 24, "--model", model)
    words = (*words, "--tracks", "FP16", "Int4", "--out", out)
    assert kvabr(*words, "--contexts", 2) == 0
    catalog = open_asset(out).catalog
    assert (catalog.passage.base, catalog.passage.contexts, catalog.tokens, catalog.groups) == ("mean", 2, 150, 2)
    assert [share for share, _ in catalog.passage.fusion] == [0.0, 0.05, 0.15, 0.3]
    assert len(catalog.passage.order) == 150
    assert open_asset(out).prompt().tokens
    capsys.readouterr()
    assert kvabr("inspect", out, "--check", "--json", report) == 0
    said = capsys.readouterr().out
    for line in (
        "a passage, playable anywhere",
        "computed: mean over 2 contexts",
        "passage digest",
        "15% of its tokens",
        ": 0 bad",
    ):
        assert line in said
    assert json.loads(report.read_text())["passage"]["base"] == "mean"
    assert kvabr("inspect", catalog_file(out)) == 0


@pytest.mark.slow
def test_fusion_losses_of_a_model_are_measured_once(tmp_path, capsys):
    model, file, text = tinymodels.save(tmp_path / "model"), tmp_path / "f.json", tmp_path / "text.txt"
    text.write_text("Some words about a passage that may be used anywhere. " * 8)
    assert kvabr("calibrate", "--blend", "--model", model, "--out", file) == 0
    assert "loss of each passage of a prompt" in capsys.readouterr().out
    found = FusionLosses.read(file)
    assert [share for share, _ in found.losses] == [0.0, 0.05, 0.15, 0.3]
    assert all(loss > 0 for _, loss in found.losses)
    words = ("encode", "--passage", "--text", text, "--tokens", 150, "--fusion", file, "--tracks", "FP16")
    assert kvabr(*words, "--model", model, "--out", tmp_path / "o") == 0
    notes = open_asset(tmp_path / "o").catalog.passage
    assert (notes.base, notes.contexts, notes.fusion) == ("mean", 4, found.losses)
    assert notes.fusion_loss(0.0) == found.losses[0][1]
    # Another number of contexts, and another model.
    capsys.readouterr()
    assert kvabr(*words, "--model", model, "--contexts", 2, "--out", tmp_path / "p") == 2
    said = capsys.readouterr().err
    assert "the mean over 4 contexts, but this passage is computed as the mean over 2 contexts" in said
    other = tinymodels.save(tmp_path / "other", num_hidden_layers=3)
    assert kvabr(*words, "--model", other, "--out", tmp_path / "p") == 1
    assert "measure them with `kvabr calibrate --blend`" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text(measuring_texts()["manual"][:3000])
    return tmp_path / "text"


@pytest.mark.model
@pytest.mark.parametrize("live", [False, True])
def test_a_prompt_is_published_and_known_the_second_time(live, text, tmp_path, capsys):
    model = tinymodels.save(tmp_path / "tiny")
    out, report = tmp_path / "assets", tmp_path / "report.json"
    words = ["prefill", "--text", text, "--tokens", 300, "--model", model, "--out", out, "--json", report]
    words += ["--live", "--edge", "Int4"] if live else []
    assert kvabr(*words) == 0
    said = capsys.readouterr().out
    asset = open_asset(out)
    catalog, path = asset.catalog, out / asset.prompt_digest
    assert (f"can be played from now on: {catalog.spec.model}/{path.name}" in said) == live
    assert f"asset: {path} (300 tokens" in said
    assert [track.name for track in catalog.tracks] == ["FP16", "Int8", "Int4"]
    asset.check_parts()
    value = json.loads(report.read_text())
    assert (value["schema"], value["command"]) == ("kvabr.result/1", "prefill")
    assert (value["asset"], value["tokens"], value["verdict"]) == (str(path), 300, "published")
    assert value["bytes"] == sum(track.total_bytes for track in catalog.tracks)
    capsys.readouterr()
    assert kvabr(*words) == 0
    assert f"already published: {path}" in capsys.readouterr().out
    next((out / "i").iterdir()).unlink()
    assert kvabr(*words) == 1
    assert "is missing; `kvabr store verify --repair` writes it again" in capsys.readouterr().err


@pytest.mark.model
def test_what_another_process_publishes_is_not_computed(text, tmp_path, capsys, monkeypatch):
    words = ["prefill", "--text", text, "--tokens", 300, "--model", tinymodels.save(tmp_path / "tiny"), "--live"]
    assert kvabr(*words, "--out", tmp_path / "one") == 0
    (tmp_path / "two").mkdir()
    name = open_asset(tmp_path / "one").prompt_digest
    claim = NameClaim(tmp_path / "two" / name)
    assert claim.take()
    monkeypatch.setattr(TransformersEngine, "extend", None)  # nothing is computed
    monkeypatch.setattr(publish, "_pace", lambda *_: PrefillCost.from_rate(1000.0))
    capsys.readouterr()
    assert kvabr(*words, "--out", tmp_path / "two") == 0
    assert f"another process is publishing this cache: {tmp_path / 'two' / name}" in capsys.readouterr().out
    claim.release()


@pytest.mark.model
def test_texts_and_options_that_do_not_fit_the_model(text, tmp_path, capsys):
    model, out = tinymodels.save(tmp_path / "tiny"), tmp_path / "assets"
    base = ("prefill", "--text", text, "--model", model, "--out", out)
    assert kvabr(*base) == 2
    assert "tokens do not fit the context of tiny" in capsys.readouterr().err
    assert kvabr(*base, "--tokens", 4000) == 2
    assert "give a longer text, or --tokens" in capsys.readouterr().err
    assert kvabr(*base, "--tokens", 200, "--tracks", "AC-L0") == 2
    assert "needs a codec profile" in capsys.readouterr().err
    prior = tmp_path / "prior"
    toy_asset(prior, tracks=("Int4",))
    assert kvabr(*base, "--tokens", 200, "--prior", prior, "--tracks", "Int8") == 2
    assert "the loss of track Int8 is unknown" in capsys.readouterr().err
    assert kvabr(*base, "--tokens", 200, "--prior", prior, "--tracks", "Int4", "--live") == 0
