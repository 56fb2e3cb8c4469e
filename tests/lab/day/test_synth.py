import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.cli.main import main
from kvabr_lab.cli.traces import describe
from kvabr_lab.day.synth import KINDS, Shape, synthesise

ROOT = Path(__file__).resolve().parents[3]
MBIT = 125_000.0


@given(
    kind=st.sampled_from(KINDS),
    mean=st.floats(0.5, 1e5),
    duration=st.floats(20, 400),
    step=st.sampled_from([0.1, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_mean_and_duration_are_met(kind, mean, duration, step, seed):
    shape = Shape(outage_every_s=5.0, outage_s=1.0)
    trace = synthesise(kind, mean_mbps=mean, duration_s=duration, step_s=step, seed=seed, shape=shape)
    assert trace.duration_s == duration
    assert trace.mean_rate / MBIT == pytest.approx(mean, abs=5e-4)  # half of what rates are rounded to
    assert all(rate % 125 == 0 for rate in trace.rates)


def test_outages_are_as_often_and_as_long_as_asked():
    shape = Shape(outage_every_s=20.0, outage_s=5.0)
    trace = synthesise("outages", mean_mbps=30, duration_s=20_000, step_s=0.5, seed=1, shape=shape)
    assert describe(trace)["zero_share"] == pytest.approx(5 / 25, rel=0.1)
    begins = sum(a > 0 and b == 0 for a, b in pairwise(trace.rates))
    assert begins == pytest.approx(20_000 / 25, rel=0.15)


def test_the_share_of_a_port_is_one_over_the_flows_on_it():
    shape = Shape(cross=0.5, fan_in=0.0, pause_s=1e-6)
    trace = synthesise("port", mean_mbps=1e6, duration_s=2000, step_s=0.01, seed=1, shape=shape)
    peak = max(trace.rates)
    shares = {round(peak / rate, 4) for rate in trace.rates}
    assert shares >= {1.0, 2.0, 3.0}
    assert all(share == round(share) for share in shares)
    # What the others carry: in every moment their number times the play's rate.
    others = sum((end - start) * (peak - rate) for start, end, rate in trace.segments())
    assert others / (peak * 2000) == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize("path", sorted((ROOT / "traces").glob("*.csv")), ids=lambda path: path.stem)
def test_the_project_s_traces_are_what_their_headers_say(path, tmp_path):
    data, out = path.read_bytes(), tmp_path / path.name
    note = data.decode().split("# note: ", 1)[1].partition("\n")[0]
    words = shlex.split(note)
    assert words[:3] == ["kvabr", "traces", "synth"]
    assert main([*words[1:], "--out", str(out)]) == 0
    assert out.read_bytes() == data
    assert len(data) < 60_000
    assert f"`{path.name}`" in (ROOT / "traces" / "README.md").read_text(encoding="utf-8")
