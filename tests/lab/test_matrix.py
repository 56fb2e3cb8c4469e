import pytest

from kvabr.types.errors import AssetError, KvabrError
from kvabr_lab.matrix import EngineSpec, build, read_toml, varying
from kvabr_lab.results_folder import load_matrix, save_axes
from tests.catalogs import catalog
from tests.lab.matrices import matrix, tuned


def trace_file(path, rate=1.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("time_s,mbit_s\n" + "".join(f"{t},{rate + t % 3}\n" for t in range(20)))
    return path


def test_cells_are_every_combination_and_starts_only_add():
    what = matrix(deadlines=(1.0, 2.0), rtts=(None, 0.03), engines=(EngineSpec.parse("none"), EngineSpec.parse("2x")))
    cells = list(what.cells())
    assert len(set(cells)) == 2 * 2 * 2 * 2
    assert what.plays == 16 * 6 * 2 * 3
    assert varying(cells) == ["deadline_s", "load", "rtt_s", "engine"]
    assert varying(cells[:1]) == ["asset", "deadline_s", "load", "rtt_s", "engine"]
    assert cells[0].title(["load", "engine"]) == "load 0.1 · no engine"
    trace = what.traces[1]
    few, many = matrix().starts_of(trace, 2), matrix().starts_of(trace, 5)
    assert many[:2] == few
    assert few[0] == 0.0
    assert matrix(seed=9).starts_of(trace, 2)[1] != few[1]


def test_every_family_may_have_as_many_plays():
    what = matrix(per_family=6)
    per_family = {}
    for trace, count in zip(what.traces, what.counts(), strict=True):
        per_family[trace.family] = per_family.get(trace.family, 0) + count
    assert per_family == {"calm": 6, "rough": 6, "bursts": 6}
    assert what.plays == 18 * 2 * 3
    assert sum(matrix(per_family=7).counts()) == 3 * 7
    assert matrix(per_family=1).counts().count(1) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"traces": ()}, {"policies": ()}, {"starts": 0}, {"per_family": 0}, {"deadlines": (0.0,)},
        {"loads": (0.1, 0.1)},
        {"policies": ("nosuch",)}, {"policies": ("fixed:nosuch",)}, {"policies": ("mpc", "mpc")}, {"rtts": (-1.0,)},
        {"estimator": "nosuch"}, {"starts": 10_000_000}, {"loads": (float("nan"),)},
        {"engines": (EngineSpec.parse("asset"),)},
    ],
)  # fmt: skip
def test_matrices_that_make_no_sense_are_refused_before_anything_is_played(changes):
    with pytest.raises(KvabrError):
        matrix(**changes)


def test_a_matrix_from_a_file(tmp_path):
    trace_file(tmp_path / "lte" / "a.csv")
    trace_file(tmp_path / "lte" / "b.csv", 3.0)
    trace_file(tmp_path / "grid" / "c.csv")
    trace_file(tmp_path / "other" / "d.csv")
    (tmp_path / "small.json").write_text(catalog(6).dumps())
    tuned(tmp_path)
    path = tmp_path / "matrix.toml"
    path.write_text(
        'traces = ["lte", "grid"]\nexclude = ["grid"]\npolicies = ["mpc", "./mine.py:Mine:caution=0.5", "all"]\n'
        'deadlines = [1, 2.5]\nloads = [0.1, "own"]\nrtts = [10, "own"]\nengines = ["none", "2x:suffix"]\n'
        'assets = ["small.json", "smollm2-8k"]\nstarts = 2\nseed = 7\ndecode_scale = 0.5\ndecoders = 3\n'
        'slow_start = false\nestimator = "last"\n[families]\nmine = ["other/d.csv"]\n'
    )
    what = build(read_toml(path))
    assert [trace.name for trace in what.traces] == ["lte/a", "lte/b", "mine/d"]
    assert {trace.family for trace in what.traces} == {"lte", "mine"}
    assert what.policies[0] == "mpc"
    assert what.policies[1].endswith("mine.py:Mine:caution=0.5")
    assert "fixed:AC-5x" in what.policies
    assert "cheapfirst" in what.policies
    assert (what.deadlines, what.loads, what.rtts) == ((1.0, 2.5), (0.1, None), (0.01, None))
    assert [offer.name for offer in what.offers] == ["small", "smollm2-8k"]
    assert (what.starts, what.seed, what.decode_scale, what.decoders) == (2, 7, 0.5, 3)
    assert (what.slow_start, what.estimator) == (False, "last")
    folder = tmp_path / "out"
    folder.mkdir()
    save_axes(folder, read_toml(path))
    assert load_matrix(folder) == what


@pytest.mark.parametrize(
    "text",
    [
        "traces = 7", "nosuch = 1", "traces = [", 'traces = [""]', "traces = [3]", 'traces = ["lte"]\nrtts = ["fast"]',
        'traces = ["lte"]\nstarts = 1.5', 'traces = ["lte"]\ndeadlines = [true]', 'traces = ["lte"]\nexclude = ["x"]',
        'families = 3\ntraces = ["lte"]', 'traces = ["lte"]\nassets = ["absent"]', 'traces = ["absent"]', "",
        'traces = ["lte"]\nestimator = 3', 'traces = ["lte"]\npolicies = [7]', 'traces = ["lte"]\nengines = [2]',
    ],
)  # fmt: skip
def test_files_that_make_no_sense_say_so(tmp_path, text):
    trace_file(tmp_path / "lte" / "a.csv")
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    with pytest.raises(KvabrError):
        build(read_toml(path))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"families": 3}', '{"families": {"a": 3}}', '{"traces": 3}', "[" * 9999]
)
def test_folders_that_are_no_results_are_refused(tmp_path, text):
    (tmp_path / "matrix.json").write_text(text)
    with pytest.raises(AssetError):
        load_matrix(tmp_path)
    with pytest.raises(AssetError, match="kvabr lab"):
        load_matrix(tmp_path / "absent")
