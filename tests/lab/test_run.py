import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import kvabr
import kvabr_lab
from kvabr.types.errors import AssetError, PlayError, PolicyError
from kvabr_lab import digests
from kvabr_lab.matrix import EngineSpec, Offer
from kvabr_lab.results_folder import FILE, PlayStore
from kvabr_lab.run import Keys, run
from kvabr_lab.totals import result
from tests.catalogs import catalog
from tests.lab.matrices import matrix, traces

pytestmark = pytest.mark.slow


def played(folder, what, **options):
    with PlayStore(folder) as store:
        return run(what, store, **options)


def test_any_number_of_processes_gives_the_same_and_nothing_is_played_twice(tmp_path):
    what = matrix()
    one, two = played(tmp_path / "one", what, jobs=1), played(tmp_path / "two", what, jobs=2)
    assert one == two
    assert one.fresh == what.plays == 2 * 6 * 2 * 3
    told, planned = [], []
    again = played(tmp_path / "one", what, progress=told.append, planned=lambda *both: planned.append(both))
    assert again.fresh == 0
    assert not told
    assert planned == [(0, what.plays)]
    assert again.lines == one.lines
    assert json.dumps(result(what, again)) == json.dumps(result(what, one))


def test_what_a_play_depends_on_is_in_its_key():
    base = matrix()
    cell = next(base.cells())
    keys = {Keys(base).key(cell, 0, "mpc")}
    others = [
        matrix(seed=4),
        matrix(offers=(Offer("small", catalog(9, layered=True)),)),
        matrix(traces=tuple(trace.scaled(2.0) for trace in traces())),
        matrix(deadlines=(1.5,)), matrix(loads=(0.2,)), matrix(rtts=(0.04,)), matrix(estimator="last"),
        matrix(engines=(EngineSpec.parse("2x"),)), matrix(engines=(EngineSpec.parse("2x:suffix"),)),
        matrix(decode_scale=2.0), matrix(decoders=2), matrix(slow_start=False),
    ]  # fmt: skip
    for other in others:
        keys.add(Keys(other).key(next(other.cells()), 0, "mpc"))
    keys.add(Keys(base).key(cell, 1, "mpc"))
    keys.add(Keys(base).key(cell, 0, "cheapfirst"))
    assert len(keys) == len(others) + 3
    # How many starts there are, and what else is played, is not in it.
    assert Keys(matrix(starts=7, policies=("mpc",))).key(cell, 0, "mpc") in keys


def test_a_policy_is_played_again_when_its_file_or_one_beside_it_changes(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("SHARE = 0.5\n")
    path = tmp_path / "using.py"
    path.write_text(
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent))\n"
        "from helper_of_mine import SHARE\nfrom kvabr.abr.policies.mpc import Mpc\n\n\n"
        "class Using(Mpc):\n    share = SHARE\n"
    )
    text = f"{path}:Using"
    before = digests.of_policy(text)
    assert digests.of_policy(text) == before
    (tmp_path / "helper_of_mine.py").write_text("SHARE = 0.6\n")
    after = digests.of_policy(text)
    assert after != before
    path.write_text(path.read_text() + "# a word\n")
    assert digests.of_policy(text) not in {before, after}


def test_all_code_that_a_play_loads_is_in_a_digest():
    """What a fresh process loads to play, but for what only names things or says what went wrong."""
    ask = (
        "import sys, kvabr_lab.cell, kvabr.abr.plugins\n"
        "for name, module in sys.modules.items():\n"
        "    if name.startswith(('kvabr.', 'kvabr_lab.')): print(module.__file__)\n"
    )
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout  # noqa: S603
    roots = {Path(kvabr.__file__).parent: "", Path(kvabr_lab.__file__).parent: "lab/"}
    loaded = {
        own + Path(line).relative_to(root).as_posix()
        for line in said.splitlines()
        for root, own in roots.items()
        if Path(line).is_relative_to(root)
    }
    assert {"player/session.py", "replay/link.py", "abr/policies/mpc.py", "lab/causes.py"} <= loaded
    covered = {name for name, _ in digests.sources()}
    apart = {name for name in loaded if name.startswith(("abr/policies/", "abr/estimators.py"))}
    assert loaded <= covered | apart
    assert not covered & apart


def test_an_interrupt_keeps_what_is_done(tmp_path):
    what, done = matrix(), []

    def stop(plays):
        done.append(plays)
        if len(done) == 2:
            raise KeyboardInterrupt

    for jobs in (1, 2):
        done.clear()
        folder = tmp_path / str(jobs)
        with pytest.raises(KeyboardInterrupt):
            played(folder, what, jobs=jobs, progress=stop)
        assert played(folder, what).fresh == what.plays - sum(done)


@pytest.mark.parametrize(("body", "error"), [("return 7", PolicyError), ("__import__('os')._exit(3)", PlayError)])
def test_a_policy_that_fails_late_or_ends_its_process_fails_the_run_and_keeps_the_rest(tmp_path, body, error):
    path, good = tmp_path / "late.py", matrix(policies=("cheapfirst",))
    path.write_text(f"from kvabr.abr import Policy\nclass Late(Policy):\n    def decide(self, view): {body}\n")
    first = played(tmp_path / "out", good)
    with pytest.raises(error):
        played(tmp_path / "out", matrix(policies=("cheapfirst", f"{path}:Late")), jobs=2)
    assert played(tmp_path / "out", good).fresh == 0 < first.fresh


def test_corrupt_lines_are_played_again(tmp_path):
    what = matrix(policies=("cheapfirst",), loads=(0.1,))
    first = played(tmp_path, what)
    lines = ["", "null", "{}", "[" * 10000, '{"regret": 1}', "x" * 70000]
    with sqlite3.connect(tmp_path / FILE) as base:
        rows = base.execute("SELECT key, start, line FROM plays ORDER BY key, start").fetchall()
        rows.sort(key=lambda row: '"causes":null' in row[2])
        edited = [rows[0][2].replace('"met":true', '"met":1').replace('"met":false', '"met":0')]
        edited.append(rows[1][2].replace('"loss":', '"loss":"a","was":'))
        edited.append(rows[2][2].replace('"order":', '"orders":'))
        lines = [*edited, *lines]
        for (key, start, _), line in zip(rows, lines, strict=False):
            base.execute("UPDATE plays SET line = ? WHERE key = ? AND start = ?", (line, key, start))
    base.close()
    again = played(tmp_path, what)
    assert again.fresh == len(lines)
    assert again.lines == first.lines


def test_what_is_no_store_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"something else entirely" * 100)
    with pytest.raises(AssetError, match="delete it"):
        PlayStore(tmp_path)
    newer = tmp_path / "newer"
    newer.mkdir()
    with sqlite3.connect(newer / FILE) as base:
        base.execute("PRAGMA user_version=99")
    base.close()
    with pytest.raises(AssetError, match="another version"):
        PlayStore(newer)
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError):
        PlayStore(tmp_path / "file" / "below")


def test_totals_say_what_the_lines_say(tmp_path):
    what = matrix(engines=(EngineSpec.parse("none"), EngineSpec.parse("2x")))
    told = result(what, played(tmp_path, what))
    assert told["schema"] == "kvabr.lab/1"
    assert told["plays"] == what.plays == sum(line["runs"] for line in told["summary"].values())
    assert len(told["cells"]) == 4
    assert set(told["families"]) == {"bursts", "calm", "rough"}
    for line in told["summary"].values():
        assert sum(line["causes"].values()) == pytest.approx(line["regret_mean"], rel=1e-4, abs=1e-6)
        assert line["regret_ci95"][0] <= line["regret_mean"] <= line["regret_ci95"][1]
        assert line["apart"]["plays"] == line["infeasible"]
        low, high = line["hit_ratio_ci95"]
        assert low <= line["hit_ratio"] <= high
    by_engine = {cell["engine"]: cell["summary"]["cheapfirst"] for cell in told["cells"] if cell["load"] == 0.1}
    assert by_engine["none"]["network_regret_mean"] == by_engine["none"]["regret_mean"]
    assert by_engine["2x"]["network_regret_mean"] <= by_engine["2x"]["regret_mean"]
    plays = [cell["comparison"]["plays"] for cell in told["cells"]]
    assert told["comparison"]["plays"] == sum(plays)
    json.dumps(told, allow_nan=False)
