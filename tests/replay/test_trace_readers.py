"""Every format on samples written by hand, and what each refuses."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.replay import readers
from kvabr.replay.readers import Columns, find, native, read, sniff
from kvabr.replay.trace import Trace
from kvabr.types.errors import TraceError, TraceQuestionError
from kvabr_lab.cli.traces import dumps

MBIT = 125_000.0


@pytest.fixture
def put(tmp_path):
    def write(text, name="set/a.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def only(path, **options):
    (trace,) = read(path, **options)
    return trace


# --- mahimahi


def test_mahimahi_counts_packets_per_millisecond(put):
    # Two packets in ms 0, one in ms 1, none in 2 and 3; the one at ms 4, where the trace wraps, joins ms 0.
    path = put("0\n0\n1\n4\n", "cell/x.down")
    assert sniff(path) == "mahimahi"
    trace = only(path)
    packet = 1500 * 1000.0
    assert (trace.times, trace.rates, trace.duration_s) == ((0.0, 0.001, 0.002), (3 * packet, packet, 0.0), 0.004)
    assert (trace.name, trace.family) == ("cell/x.down", "cell")


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80).filter(max))
def test_mahimahi_carries_every_packet(stamps):
    source = readers.TraceFile(readers.Path("x"), "\n".join(map(str, sorted(stamps))), "x", "x")
    (trace,) = readers.line_formats.parse_mahimahi(source)
    assert trace.mean_rate * trace.duration_s == pytest.approx(1500 * len(stamps))
    assert trace.duration_s == max(stamps) / 1000


# --- sabre


def test_sabre_stretches_and_mean_latency(put):
    entries = [
        {"duration_ms": 1500, "bandwidth_kbps": 800, "latency_ms": 20},
        {"duration_ms": 500, "bandwidth_kbps": 0, "latency_ms": 60},
    ]
    path = put(json.dumps(entries), "log.json")
    assert sniff(path) == "sabre"
    trace = only(path)
    assert (trace.times, trace.rates, trace.duration_s) == ((0.0, 1.5), (1e5, 0.0), 2.0)
    assert trace.rtt_s == pytest.approx(0.03)
    for entry in entries:
        del entry["latency_ms"]
    assert only(put(json.dumps(entries))).rtt_s is None


# --- Pensieve


@pytest.mark.parametrize("gap", [" ", "\t", "   "])
def test_pensieve_rates_hold_until_the_next_row(put, gap):
    path = put(f"# seconds Mbit/s\n1.0{gap}2\n\n1.5{gap}0\n3.0{gap}4.5\n", "norway_bus_1")
    assert sniff(path) == "pensieve"
    trace = only(path)
    assert (trace.times, trace.rates) == ((0.0, 0.5, 2.0), (2 * MBIT, 0.0, 4.5 * MBIT))
    assert trace.duration_s == 2.0 + 1.0  # the last row lasts the median step
    assert trace.rtt_s is None


# --- iperf3


def interval(start, end, rate, *, omitted=False, seconds=None, rtt=None):
    total = {"start": start, "end": end, "bits_per_second": rate, "omitted": omitted}
    total["seconds"] = end - start if seconds is None else seconds
    return {"streams": [{} if rtt is None else {"rtt": rtt}], "sum": total}


def test_iperf3_leaves_slow_start_out(put):
    report = {
        "start": {"version": "iperf 3.9"},
        "intervals": [
            interval(0, 1, 8e6, omitted=True, rtt=1000),
            # Straddles the end of the omitted part: its length disagrees with its start and end.
            interval(0.9999, 1.0, 4e6, seconds=2.0, rtt=1000),
            interval(1.0, 2.0, 16e6, rtt=30_000),
            interval(2.0, 3.5, 24e6, rtt=20_000),
        ],
    }
    path = put(json.dumps(report), "run.json")
    assert sniff(path) == "iperf3"
    trace = only(path)
    assert (trace.times, trace.rates, trace.duration_s) == ((0.0, 1.0), (2e6, 3e6), 2.5)
    assert trace.rtt_s == 0.02


# --- value,unit


def test_values_with_units_of_their_own(put):
    path = put("1.5,Mbits/sec\r\n250,Kbits/sec\r\n0,bits/sec\r\n2,MBytes/sec\r\n", "train.csv")
    assert sniff(path) == "values"
    trace = only(path)
    assert trace.rates == (1.5 * MBIT, 0.25 * MBIT, 0.0, 2 * 1024.0**2)
    assert (trace.times, trace.duration_s) == ((0.0, 1.0, 2.0, 3.0), 4.0)


# --- CSV with a header

ROAD = """\
timestamp_start,timestamp_end,server,download,upload,average_speed,download_mbps,upload_mbps
2024-05-01 10:00:00,2024-05-01 10:00:01,a,8000000,1,3,8,1
2024-05-01 10:00:01,2024-05-01 10:00:02,a,16000000,1,3,16,1
2024-05-01 10:00:42,2024-05-01 10:00:43,a,24000000,1,3,24,1
2024-05-01 10:00:43,2024-05-01 10:00:44,a,,1,3,,1
2024-05-01 10:00:44,2024-05-01 10:00:45,a,32000000,1,3,32,1
2024-05-01 10:01:30,2024-05-01 10:01:44,a,0,,3,0,
2024-05-01 10:02:00,2024-05-02 10:02:00,a,40000000,1,3,40,1
2024-05-01 10:02:01,2024-05-01 10:02:02,a,0,1,3,0,1
"""


def test_csv_splits_into_sessions(put):
    path = put(ROAD, "road/iperf.csv")
    assert sniff(path) == "csv"
    traces = read(path)
    assert [trace.name for trace in traces] == [f"road/iperf-000{number}" for number in (1, 2, 3, 4)]
    assert {trace.family for trace in traces} == {"road"}
    first, second, third, fourth = traces
    assert (first.times, first.rates, first.duration_s) == ((0.0, 1.0), (1e6, 2e6), 2.0)
    # A row without a rate ends a session; the one with nothing but zero is left out.
    assert [(trace.rates, trace.duration_s) for trace in (second, third)] == [((3e6,), 1.0), ((4e6,), 1.0)]
    # A row that claims a whole day ends where the next begins.
    assert (fourth.times, fourth.rates, fourth.duration_s) == ((0.0, 1.0), (5e6, 0.0), 2.0)


@pytest.mark.parametrize(("delimiter", "bom"), [(",", ""), (";", ""), ("\t", "\ufeff")])
def test_csv_delimiters_and_milliseconds(put, delimiter, bom):
    text = f"{bom}time_ms,loss,up_kbps,down_kbps\n# note\n500,0,1,8\n1000,0,1,16\n1500,0,1,8\n".replace(",", delimiter)
    trace = only(put(text))
    assert (trace.times, trace.rates, trace.duration_s) == ((0.0, 0.5, 1.0), (1000.0, 2000.0, 1000.0), 1.5)


def test_csv_without_end_splits_at_a_jump(put):
    text = "time,mbps\n0,1\n1,1\n2,1\n100,2\n101,2\n103,2\n"
    first, second = read(put(text))
    assert (first.duration_s, second.times, second.duration_s) == (3.0, (0.0, 1.0, 3.0), 4.0)


def test_csv_columns_named_by_the_user(put):
    path = put("when,until,a,b\n10,20,1,5\n20,40,2,6\n")
    columns = Columns(time="WHEN", end="until", rate="b", unit="kbyte/s", time_unit="ms")
    trace = only(path, columns=columns)
    assert (trace.times, trace.rates, trace.duration_s) == ((0.0, 0.01), (5e3, 6e3), 0.03)
    assert only(path, columns=Columns(rate="a", unit="byte/s", step_s=0.5)).duration_s == 1.0


# --- kvabr's own format

traces = st.builds(
    lambda steps, rates, rtt: Trace(
        "lte/walk-1", "lte", tuple(map(float, steps[:-1])), (*rates[: len(steps) - 2], 1.0), float(steps[-1]), rtt
    ),
    st.lists(st.floats(1e-3, 1e7), min_size=1, max_size=20, unique=True).map(lambda times: [0.0, *sorted(times)]),
    st.lists(st.floats(0, 1e12), min_size=20, max_size=20),
    st.none() | st.floats(0, 10),
)


@given(traces, st.text(max_size=20))
def test_native_loses_nothing(trace, note):
    text = dumps(trace, note)
    source = readers.TraceFile(readers.Path("x.csv"), text, "other/name", "other")
    assert native.parse(source) == [trace]
    assert dumps(native.parse(source)[0], note) == text


@given(traces, st.data())
def test_native_notices_a_lost_end(trace, data):
    text = dumps(trace)
    kept = data.draw(st.integers(0, len(text) - 2))  # at least the `d` of `end` is gone
    with pytest.raises(TraceError):
        native.parse(readers.TraceFile(readers.Path("x.csv"), text[:kept], "n", "f"))


# --- the front

ONE = '{"duration_ms": 1, "bandwidth_kbps": 1'
HEAD = "# kvabr.trace/1\n"
ROWS = "time_s,bits_per_second\n0,8\n1,end\n"
REFUSED = {
    None: [
        *("", "\n\n", "hello world, this is prose\n", '{"a": 1}', "[1, 2]", "a,b\n1,2\n", "1,2\n3,4\n"),
        *("time,mbps\n", "time,mbps\n0,\n1,\n", "time,mbps\n0,0\n1,0\n", "time,mbps\n0,1\n1,-1\n"),
        *("time,mbps\n0,1\n1,inf\n", "time,mbps\n0,1\nnan,1\n2,1\n", "time,mbps\n0,1\n2,1\n1,1\n"),
        *("time,mbps\n0,1\n0,2\n", "time,mbps\n0,5,12,5\n", "time,mbps\n0,1\n\n# x\n1,fast\n"),
        *("time,mbps\nnoon,1\n", "time,mbps\n0,1\n1\n", "start,end,mbps\n0,1,1\n1,1,1\n"),
        *("time,a_mbps,b_mbps\n0,1,1\n", "time,rate\n0,1\n", "time,mbps\n0," + "1" * 200_000 + "\n"),
        *("# kvabr.trace/2\n" + ROWS, HEAD + "time_s,mbps\n0,8\n1,end\n"),
        *(HEAD + ROWS.replace("end", "8"), HEAD + ROWS.replace("0,8\n", ""), HEAD + ROWS + "2,8\n"),
        *(HEAD + ROWS.replace("1,end", "1,-8\n2,end"), HEAD + ROWS.replace("1,end", "0,end")),
        *(HEAD + "# name: ../../evil\n" + ROWS, HEAD + "# name: a//b\n" + ROWS),
        *(HEAD + "# family: a\x1b[31m\n" + ROWS, HEAD + "# rtt_s: soon\n" + ROWS, HEAD + "# rtt_s: -1\n" + ROWS),
    ],
    "mahimahi": ["0\n0\n", "0\n5\n3\n9\n", "0\n5\n-3\n", "0\n5\n9999999999999999\n", "0\n9\n3\n"],
    "sabre": [
        *("[]", f"[{ONE}}}, {{}}]", f"[{ONE.replace('1', '0', 1)}}}]", f"[{ONE.replace('1', '1e999', 1)}}}]"),
        *(f"[{ONE[:-1]}{rate}}}]" for rate in ("-5", "NaN", "true", "1" + "0" * 400, "0")),
        *(f'[{ONE}, "latency_ms": -1}}]', f"[{ONE}, ", "[" * 100_000, f"{ONE}}}"),
    ],
    "pensieve": [
        *("0 1\n1 x\n", "0 1\n1\n", "0 1\n2 1\n1 1\n", "0 1\n# here\n0 1\n", "0 1\n1 -2\n", "0 1\n1 nan\n"),
        *("nan 1\n1 1\n", "0 1\n1 1\ninf 1\n", "0 0\n1 0\n", "# nothing\n"),
    ],
    "iperf3": [
        json.dumps(report)
        for report in (
            *({"intervals": []}, {"intervals": [interval(0, 1, 1e6, omitted=True)]}, {"end": {}}, []),
            *({"intervals": [], "error": "unable to connect"}, {"intervals": [{"sum": {"start": 0}}]}),
            *({"intervals": [interval(0, 1, 1e6), interval(0, 1, 1e6)]}, {"intervals": [7]}),
            {"intervals": [interval(0, 1, 1e6), interval(1, 2, -1e6)]},
        )
    ],
    "values": [f"1,Mbits/sec\n{bad}\n" for bad in ("1,parsecs", "-1,Mbits/sec", "one,Mbits/sec", "1")],
}


@pytest.mark.parametrize("format_name", REFUSED)
def test_what_is_no_trace_is_refused(put, format_name):
    for text in REFUSED[format_name]:
        with pytest.raises(TraceError):
            read(put(text), format_name=format_name)


@pytest.mark.parametrize(
    "text",
    ["time_s,mbps\n0,1\n1e-7,2\n2e-7,1\n", "time_us,mbps\n0,1\n1,2\n2,1\n", HEAD + ROWS.replace("1,end", "1e-9,end")],
)
def test_a_trace_that_would_be_repeated_without_end_names_its_length_and_the_unit(put, text):
    with pytest.raises(TraceError, match=r"at least 0\.001 s; correct the unit of its times"):
        read(put(text))


@pytest.mark.parametrize("text", ["time,mbps\n0,1\n1,fast\n", HEAD + ROWS.replace("0,8", "0,x"), "0 1\n0 0 x\n1 y\n"])
def test_a_bad_line_is_named(put, text):
    with pytest.raises(TraceError, match=r"line [23]"):
        read(put(text), format_name=None if "," in text else "pensieve")


@pytest.mark.parametrize("missing", ["nan", "-", ""])
def test_a_column_without_numbers_is_named(put, missing):
    with pytest.raises(TraceError, match="column 'mbps' has no number in any row") as caught:
        read(put(f"time_s,mbps\n0,{missing}\n1,{missing}\n"))
    assert not isinstance(caught.value, TraceQuestionError)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("x,mbps\n0,1\n", Columns(rate="mbps")), ("time,x\n0,1\n", Columns(time="time")),
        ("time,mbps\n0,1\n", Columns(rate="up")), ("time,mbps\n0,1\n", Columns(unit="furlongs")),
        ("time,mbps\n0,1\n", Columns(time_unit="days")), ("time,mbps\n0,1\n", Columns(step_s=0.0)),
        ("time,mbps\n0,1\n", Columns(step_s=math.nan)), ("", Columns(time="t")),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_are_refused(put, text, columns):
    with pytest.raises(TraceError):
        read(put(text), columns=columns)


def test_not_text_and_not_there(put, tmp_path):
    binary = put(b"\x1f\x8b\x08\x00\xff\xfe")
    assert sniff(binary) is None
    with pytest.raises(TraceError, match="not a text file"):
        read(binary)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read(path)
    with pytest.raises(TraceError, match="unknown trace format"):
        read(binary, format_name="pcap")


def test_too_large_is_refused(put, monkeypatch):
    path = put("0 1\n1 2\n")
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", 7)
    with pytest.raises(TraceError, match="more than the 7 bytes"):
        read(path)
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", 8)
    assert len(read(path)) == 1
    monkeypatch.setattr(readers.source, "MAX_LINES", 1)
    with pytest.raises(TraceError, match="2 lines, more than the 1 allowed"):
        read(path)


@given(st.binary(max_size=200) | st.text('0123456789,.- \n[]{}"#abmst:_/', max_size=120).map(str.encode))
def test_any_bytes_give_traces_or_a_trace_error(data):
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    for name, known in readers._FORMATS.items():
        try:
            result = known.parse(readers.TraceFile(readers.Path(name), text, "n", "f"))
        except TraceError:
            continue
        assert all(isinstance(trace, Trace) for trace in result)


def test_a_first_line_that_is_no_csv_is_refused(put):
    """The csv module refuses cells of more than 128 KiB by an error of its own."""
    path = put("x" * 140_000 + "\n1,2\n")
    assert sniff(path) is None
    for options in ({}, {"format_name": "csv"}, {"columns": Columns(time="time")}):
        with pytest.raises(TraceError):
            read(path, **options)


def test_find_walks_folders_in_order_and_takes_only_traces(put, tmp_path):
    kept = [
        put("0 1\n1 2\n", "b/two.log"),
        put("0 1\n1 2\n", "b/deep/er/three"),
        put("0\n5\n", "a.down"),
    ]
    put("1 2\n3 4\n", "README.md")
    put("1 2\n3 4\n", "b/SOURCE.txt")
    put("1 2\n3 4\n", "b/.hidden")
    put("1 2\n3 4\n", ".git/x")
    put("region,bits\nhere,5\n", "b/grid.csv")
    put(b"\0\0", "b/blob")
    put("", "b/empty")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    in_order = [kept[2], kept[0], kept[1]]
    assert find([tmp_path]) == in_order
    assert find([kept[0], tmp_path, kept[0]]) == [kept[0], kept[2], kept[1]]
    prose = tmp_path / "README.md"
    assert find([prose]) == [prose]  # what is named is taken


def test_find_refuses_what_is_not_there(tmp_path, put):
    with pytest.raises(TraceError, match="no such file or folder"):
        find([tmp_path / "nowhere"])
    put("prose\n", "empty/README")
    with pytest.raises(TraceError, match="no traces in this folder"):
        find([tmp_path / "empty"])


def test_a_family_is_the_data_set(put, monkeypatch):
    path = put("0 1\n1 2\n", "cloud/path-a/run-1.json")
    assert only(path).name == "path-a/run-1"
    put("from somewhere\n", "cloud/SOURCE.txt")
    trace = only(path)
    assert (trace.family, trace.name) == ("cloud", "cloud/path-a/run-1")
    monkeypatch.chdir(path.parent)
    assert only(readers.Path("run-1.json")) == trace
    assert only(readers.Path("../path-a/run-1.json")) == trace
