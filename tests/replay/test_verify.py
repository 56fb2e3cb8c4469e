"""Verification: the steps of a play, carried out for real."""

import shutil

import pytest

from kvabr.replay.verify import ComputeStep, FetchStep, Verifier, steps_of, verify_play
from kvabr.store.locations import open_asset
from kvabr.store.names import prompt_name
from kvabr.types.errors import AssetError, FormatError, HoleError, ModelError, UsageError
from tests import kvdata
from tests.assets import frame_file
from tests.client.classes import SLIDING, WINDOWS, Computer, published
from tests.toymodel import ToyModel, toy_asset


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return toy_asset(tmp_path_factory.mktemp("verify") / "asset", ("FP16", "Int8", "Int4"))


def fetch(track, groups=range(5)):
    return [FetchStep(group, track) for group in groups]


def test_a_whole_track_measures_as_the_encoder_did(toy):
    model = ToyModel()
    for track in toy.catalog.tracks:
        verified = verify_play(toy, model, fetch(track.name))
        assert verified.kl == pytest.approx(track.measured.kl, rel=1e-4, abs=1e-12)
        assert verified.dnll == pytest.approx(track.measured.dnll, rel=1e-3, abs=1e-6)
        assert verified.predicted == pytest.approx(sum(track.loss))


def test_upgrades_replace_in_any_order_and_what_is_computed_is_exact(toy):
    model = ToyModel()
    steps = [*fetch("Int4", [3, 0, 4, 1, 2]), *fetch("FP16", [2, 0, 1, 4, 3])]
    assert verify_play(toy, model, steps) == verify_play(toy, model, fetch("FP16"))
    verified = verify_play(toy, model, [ComputeStep(0, 5)])
    assert (verified.kl, verified.predicted) == (pytest.approx(0, abs=1e-9), 0.0)


def test_forced_misses_are_recomputed_and_predicted_within_a_factor_two(toy):
    """A hole in the middle and a missing end, behind lossy groups."""
    for steps in (
        [*fetch("Int4", [0, 1, 3, 4]), ComputeStep(2, 3)],
        [*fetch("Int4", [0, 1, 2]), ComputeStep(3, 5)],
        [ComputeStep(0, 2), *fetch("Int4", [2, 3, 4])],
    ):
        verified = verify_play(toy, ToyModel(), steps)
        assert 0.5 < verified.predicted / verified.loss < 2.0


def test_the_order_of_steps_counts(toy):
    """What is recomputed before an upgrade inherits the error that was there then."""
    model = ToyModel()
    early = [*fetch("Int4", [0, 1]), ComputeStep(2, 5), *fetch("FP16", [0, 1])]
    late = [*fetch("Int4", [0, 1]), *fetch("FP16", [0, 1]), ComputeStep(2, 5)]
    assert verify_play(toy, model, early).kl > 10 * verify_play(toy, model, late).kl


def test_never_a_hole(toy):
    with pytest.raises(HoleError, match="groups 2"):
        verify_play(toy, ToyModel(), fetch("FP16", [0, 1, 3, 4]))
    with pytest.raises(HoleError, match="groups 1"):
        verify_play(toy, ToyModel(), [FetchStep(0, "FP16"), ComputeStep(2, 5)])


def test_another_model_is_refused(toy):
    with pytest.raises(ModelError, match="the cache is of"):
        Verifier(toy, ToyModel(kvdata.spec(layers=1, group_tokens=16)))


def test_a_damaged_group_fails_the_verification(toy, tmp_path):
    shutil.copytree(toy.store.folder, tmp_path / "copy")
    copy = open_asset(tmp_path / "copy")
    frame_file(tmp_path / "copy", 1, "Int8").unlink()
    with pytest.raises(AssetError, match="no such object"):
        verify_play(copy, ToyModel(), fetch("Int8"))
    (tmp_path / "copy" / prompt_name(copy.prompt_digest)).unlink()
    with pytest.raises(AssetError, match="token ids of prompts"):
        Verifier(copy, ToyModel())


def test_steps_of_a_record():
    assert steps_of([("fetch", 3, "Int4"), ("compute", 0, 2)]) == [FetchStep(3, "Int4"), ComputeStep(0, 2)]
    for bad in (("fetch", 1, 2), ("compute", 1, "Int4"), ("dance", 1, 2)):
        with pytest.raises(FormatError, match="not a step"):
            steps_of([bad])


@pytest.fixture(scope="module", params=[SLIDING, WINDOWS], ids=lambda spec: spec.model)
def verifier(request, tmp_path_factory):
    asset = published(tmp_path_factory.mktemp("asset"), request.param, list(range(150))).assets[0]
    return asset.catalog.to_play, Verifier(asset, Computer(request.param))


def test_only_what_is_needed_is_needed(verifier):
    play, verify = verifier
    exact = verify.play(fetch("FP16", range(play.groups)))
    assert exact.kl == pytest.approx(0, abs=1e-12)
    assert exact.predicted == pytest.approx(1e-6 * play.groups)
    coarse = verify.play(fetch("Int8", range(play.groups)))
    assert coarse.kl > 0
    assert coarse.predicted == pytest.approx(0.001 * play.groups)


def test_an_engine_computes_from_a_cut_on(verifier):
    play, verify = verifier
    first = play.cut(play.groups - 1)
    assert play.tokens_before(first) == 144
    done = verify.play([*fetch("FP16", range(play.groups))[:first], ComputeStep(first, play.groups)])
    assert done.kl == pytest.approx(0, abs=1e-12)
    assert verify.play([ComputeStep(0, play.groups)]).kl == pytest.approx(0, abs=1e-12)
    inherited = verify.play([*fetch("Int8", range(play.groups))[:first], ComputeStep(first, play.groups)])
    assert 0.001 * first < inherited.predicted < 0.001 * play.groups
    with pytest.raises(UsageError, match="cannot compute"):
        verify.play([*fetch("FP16", range(play.groups))[: first - 1], ComputeStep(first - 1, play.groups)])
