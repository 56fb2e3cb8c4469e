import pytest
import torch

from kvabr.blend import Selection, Selector, choose
from kvabr.blend.selectors import load_selector, selectors
from kvabr.player.play_choices import DEFAULT_SELECTOR
from kvabr.types.errors import PolicyError, UnknownPolicyError, UsageError

PROMPT = Selection(
    tokens=10,
    passages=((2, 5), (6, 10)),
    layers=2,
    attention=torch.tensor([[9.0, 9, 1, 2, 3, 9, 4, 5, 6, 7], [9.0, 9, 1, 0, 0, 9, 0, 0, 0, 0]]),
    values=torch.tensor([[1.0, 1, 9, 1, 1, 1, 1, 1, 1, 1], [1.0] * 10]),
    orders=(bytes([3, 255, 9]), None),
    deviation=torch.tensor([[0.0] * 9 + [3.0], [0.0] * 2 + [2.0] + [0.0] * 7]),
    exact=torch.arange(10.0),
)


@pytest.mark.parametrize(
    ("name", "share", "chosen"),
    [
        ("question", 0.28, (8, 9)),
        ("question-value", 0.28, (2, 9)),
        ("order", 0.28, (3, 4)),
        # Those of the laboratory.
        ("hkvd", 0.28, (2, 9)),
        ("legolink", 0.28, (2, 6)),
        ("legolink", 0.5, (2, 3, 6, 7)),
        ("oracle", 0.1, (9,)),
    ],
)
def test_what_each_selector_chooses(name, share, chosen):
    assert choose(PROMPT, load_selector(name)().scores(PROMPT), share) == chosen


def test_peaks_bring_their_neighbours_in_the_same_passage():
    peaks = torch.zeros(3, 60)
    peaks[0, 40], peaks[1, 5], peaks[2, 20] = 0.9, 0.5, 9.0
    prompt = Selection(tokens=60, passages=((0, 30), (30, 60)), layers=3, peaks=peaks, values=torch.ones(3, 60))
    selector = load_selector("question-peaks")()
    assert choose(prompt, selector.scores(prompt), 8 / 60) == tuple(range(12, 20))
    assert selector.looks_at(30) == range(20)
    assert selector.looks_at(1) == range(1)
    only = Selection(tokens=60, passages=((0, 30), (30, 60)), layers=3, peaks=peaks[:2], values=torch.ones(2, 60))
    chosen = choose(only, selector.scores(only), 26 / 60)
    assert set(range(32, 49)) <= set(chosen)  # the higher peak, with all eight neighbours on either side
    assert not {14, 15, 16} & set(chosen)


def test_peaks_count_less_the_farther_in_a_passage_they_are():
    """Tokens that had seen little of their own text are wrong; those behind them hardly are."""
    peaks = torch.zeros(2, 400)
    peaks[:, 20], peaks[:, 190], peaks[:, 220] = 0.4, 1.0, 0.5
    prompt = Selection(tokens=400, passages=((0, 200), (200, 400)), layers=2, peaks=peaks, values=torch.ones(2, 400))
    selector = load_selector("question-peaks")()
    chosen = choose(prompt, selector.scores(prompt), 34 / 400)
    assert chosen == (*range(12, 29), *range(212, 229))


def test_tokens_outside_of_passages_are_never_chosen():
    scores = torch.tensor([9.0, 9, 0, 0, 0, 9, 0, 0, 0, 0])
    assert choose(PROMPT, scores, 1.0) == (2, 3, 4, 6, 7, 8, 9)
    assert choose(PROMPT, scores, 0.0) == ()


def test_a_share_is_rounded_up_as_a_decimal_number():
    prompt = Selection(tokens=1280, passages=((0, 1280),), layers=1)
    assert len(choose(prompt, torch.zeros(1280), 0.15)) == 192
    assert len(choose(prompt, torch.zeros(1280), 0.1501)) == 193


def test_of_equal_scores_the_earlier_tokens_come_first():
    assert choose(PROMPT, torch.zeros(10), 0.5) == (2, 3, 4, 6)


def test_without_what_it_needs_a_selector_says_so():
    bare = Selection(tokens=10, passages=((0, 10),), layers=2)
    for name, cls in selectors().items():
        if cls.needs - {"order"}:
            with pytest.raises(UsageError, match="which is not set"):
                load_selector(name)().scores(bare)


@pytest.mark.parametrize("scores", [torch.zeros(9), torch.zeros(10, 1), torch.full((10,), float("nan"))])
def test_scores_of_another_shape_are_refused(scores):
    with pytest.raises(PolicyError, match="must return 10 scores"):
        choose(PROMPT, scores, 0.1)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_none_to_all(share):
    with pytest.raises(UsageError, match=r"must be 0 to 1"):
        choose(PROMPT, torch.zeros(10), share)


MINE = """
import torch
from kvabr.blend import Selector

class Last(Selector):
    def scores(self, prompt):
        return torch.arange(float(prompt.tokens))
"""


def test_a_selector_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    made = load_selector(f"{path}:Last")()
    assert isinstance(made, Selector)
    assert choose(PROMPT, made.scores(PROMPT), 0.28) == (8, 9)
    path.with_name("none.py").write_text("import torch\n")
    with pytest.raises(PolicyError, match=r"must derive from kvabr\.blend\.Selector"):
        load_selector(f"{tmp_path}/none.py:Last")


def test_an_unknown_selector_names_those_there_are():
    with pytest.raises(UnknownPolicyError, match=r"unknown selector 'questions' .did you mean 'question'.*order"):
        load_selector("questions")


def test_an_entry_point_is_found(tmp_path, monkeypatch):
    (tmp_path / "latest.py").write_text(MINE)
    info = tmp_path / "latest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: latest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvabr.selectors]\nlatest = latest:Last\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert selectors()["latest"].__name__ == "Last"
    assert DEFAULT_SELECTOR in selectors()


def test_scores_that_are_no_tensor_are_refused():
    for scores in ([1.0] * 10, None):
        with pytest.raises(PolicyError, match="must return a tensor of 10 scores"):
            choose(PROMPT, scores, 0.1)
