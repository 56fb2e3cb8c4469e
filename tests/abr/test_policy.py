import inspect

import pytest

from kvabr.abr import Estimator, Policy
from kvabr.abr.plugins import estimators, load_estimator, load_policy, policies, policy_class
from kvabr.types.errors import PolicyError
from kvabr.types.parameters import declared
from tests.lab.matrices import tuned


def test_a_policy_takes_its_parameters_by_name(tmp_path):
    text = tuned(tmp_path)
    assert load_policy(text)()._caution == 0.7
    assert load_policy(f"{text}:caution=0.25")()._caution == 0.25
    assert load_policy(f"{text}:idle=2,caution=0.5")()._caution == 0.5
    assert list(declared(policy_class(text))) == ["caution", "idle"]
    assert declared(policy_class("cachegen")) == {}
    assert declared(policy_class("fixed:FP8")) == {}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("caution=9", "from 0.1 to 1.5"),
        ("nosuch=1", "unknown parameter nosuch; choose from caution, idle"),
        ("caution=much", "must be NAME=NUMBER"),
        ("caution=nan", "must be NAME=NUMBER"),
        ("caution=0.5,caution=0.6", "must be NAME=NUMBER"),
        ("caution=0.5,", "must be NAME=NUMBER"),
    ],
)
def test_what_a_policy_does_not_take_is_refused(tmp_path, argument, words):
    with pytest.raises(PolicyError, match=words):
        load_policy(f"{tuned(tmp_path)}:{argument}")()


@pytest.mark.parametrize(
    "table",
    [
        7, {"a": 7}, {"a": (1.0, 2.0)}, {"a": (1.0, 2.0, 3.0)}, {"a": (2.0, 1.0, 1.5)}, {"a": (0.0, 1.0, 0.5, True)},
        {"a b": (0.0, 1.0, 0.5)}, {"a": (0.0, float("inf"), 1.0)}, {"a": (1.0, 1.0, 1.0)}, {"a": ("0", 1.0, 0.5)},
        {str(number): (0.0, 1.0, 0.5) for number in range(40)},
    ],
)  # fmt: skip
def test_declarations_that_make_no_sense_are_refused(table):
    with pytest.raises(PolicyError):
        declared(type("Odd", (), {"parameters": table}))


@pytest.mark.parametrize("name", sorted(policies()))
def test_what_a_policy_declares_is_what_its_constructor_takes(name):
    cls = policies()[name]
    takes = {
        key: one.default
        for key, one in inspect.signature(cls).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    known = declared(cls)
    assert {key: parameter.default for key, parameter in known.items()} == takes
    assert all(one.low <= one.default <= one.high for one in known.values())


GOOD = """
from kvabr.abr import Decision, Policy

class Mine(Policy):
    def decide(self, view):
        return Decision.wait("test")

class Other(Policy):
    pass
"""


def test_every_name_loads_a_fresh_object():
    for name in policies():
        make = load_policy(name)
        assert isinstance(make(), Policy)
        assert make() is not make()
    for name in estimators():
        assert isinstance(load_estimator(name)(), Estimator)


def test_a_policy_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    assert type(load_policy(f"{path}:Mine")()).__name__ == "Mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nosuch", "unknown policy 'nosuch'.*cheapfirst"),
        ("{dir}/absent.py:Mine", "no such file"),
        ("{dir}/good.py:Absent", "found: Mine, Other"),
        ("{dir}/good.py:Other", "must define decide"),
        ("{dir}/good.py", "found: Mine, Other"),
        ("{dir}/syntax.py:Mine", r"syntax\.py:2: invalid syntax: class Mine"),
        ("{dir}/raises.py:Mine", r"raises\.py, line 1"),
        ("rate:7", "cannot be created"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path, text, words):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "syntax.py").write_text("x = 1\nclass Mine(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    with pytest.raises(PolicyError, match=words):
        load_policy(text.format(dir=tmp_path))()


def test_an_entry_point_is_found(tmp_path, monkeypatch):
    (tmp_path / "thirdparty.py").write_text(GOOD)
    info = tmp_path / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvabr.policies]\nthirdparty = thirdparty:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert policies()["thirdparty"].__name__ == "Mine"
    assert type(load_policy("thirdparty")()).__name__ == "Mine"


def test_files_of_one_name_in_two_folders_are_two_policies(tmp_path, monkeypatch):
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        body = f"    about = {name!r}\n    def decide(self, view): ...\n"
        text = f"from kvabr.abr import Policy\n\nclass Mine(Policy):\n{body}"
        (tmp_path / name / "mine.py").write_text(text)
        monkeypatch.chdir(tmp_path / name)
        found.append(load_policy("./mine.py:Mine")().about)
    assert found == ["one", "other"]
