"""iperf's reports in JSON, text and CSV: datagrams count where they arrive, and of two directions the download."""

import json

import pytest

from kvabr.replay.readers import read, sniff
from kvabr.types.errors import TraceError

RATES = (40e6, 12e6, 31e6)


def total(second, rate, **more):
    return {"start": second, "end": second + 1, "seconds": 1, "bits_per_second": rate, **more}


def report(sums, *, start=None, **more):
    """Return an iperf3 report of intervals with these sums by key."""
    intervals = [
        {key: total(second, rate, **said) for key, (rate, said) in sum_.items()} for second, sum_ in enumerate(sums)
    ]
    return {"start": start or {"connecting_to": {}}, "intervals": intervals, **more}


def mbits(path):
    (trace,) = read(path)
    assert trace.times == (0.0, 1.0, 2.0)
    return tuple(round(rate / 125_000, 6) for rate in trace.rates)


@pytest.fixture
def put(tmp_path):
    def write(content, name="report"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


BOTH = [{"sum": (rate / 10, {"sender": True}), "sum_bidir_reverse": (rate, {"sender": False})} for rate in RATES]


def test_of_two_directions_the_download_is_read(put):
    assert mbits(put(report(BOTH))) == (40, 12, 31)
    # A server sends what the client downloads.
    assert mbits(put(report(BOTH, start={"accepted_connection": {}}))) == (4, 1.2, 3.1)


def test_directions_that_are_not_told_apart_are_refused(put):
    unsaid = [{key: (rate, {"sender": True}) for key, (rate, _) in sums.items()} for sums in BOTH]
    with pytest.raises(TraceError):
        read(put(report(unsaid)))


UDP = {"connecting_to": {}, "test_start": {"protocol": "UDP"}}
SENT = [{"sum": (rate, {"sender": True, "packets": 1000})} for rate in RATES]


def test_datagrams_count_where_they_arrive(put):
    lost = {"sum_received": {"lost_percent": 60.0, "packets": 3000, "sender": False}}
    assert mbits(put(report(SENT, start=UDP, end=lost))) == (16, 4.8, 12.4)
    got = [{"sum": (rate / 4, {"sender": False, "packets": 9, "lost_packets": 6})} for rate in RATES]
    assert mbits(put(report(SENT, start=UDP, end=lost, server_output_json=report(got)))) == (10, 3, 7.75)
    assert mbits(put(report(got, start=UDP))) == (10, 3, 7.75)
    old = [{"sum": (rate, {"packets": 9})} for rate in RATES]  # 3.1 does not say who sends
    assert mbits(put(report(old, start=UDP, end={"sum": {"lost_percent": 50.0, "packets": 9}}))) == (20, 6, 15.5)


@pytest.mark.parametrize(
    "end",
    [{}, {"sum": {"lost_percent": 0, "packets": 0}}, {"sum": {"lost_percent": 101}}, {"sum": {"lost_percent": "x"}}],
)
def test_sent_datagrams_of_which_nobody_says_what_arrived_are_refused(put, end):
    with pytest.raises(TraceError):
        read(put(report(SENT, start=UDP, end=end)))


def test_a_stream_of_events_is_a_report(put):
    whole = report(BOTH, end={})
    events = [{"event": "start", "data": whole["start"]}]
    events += [{"event": "interval", "data": interval} for interval in whole["intervals"]]
    events += [{"event": "end", "data": {}}]
    path = put("\n".join(map(json.dumps, events)))
    assert sniff(path) == "iperf3"
    assert mbits(path) == (40, 12, 31)
    for broken in (
        "\n".join(map(json.dumps, events)) + '\n{"event',
        '{"event": "interval", "data": 7}',
        '{"event": 3}',
    ):
        with pytest.raises(TraceError):
            read(put(broken))


def text(lines, *, head="", foot=""):
    rows = "\n".join(lines)
    return f"Connecting to host 10.0.0.1, port 5201\n{head}\n[ ID] Interval  Transfer  Bitrate\n{rows}\n{foot}\n"


def line(second, rate, stream="  5", rest="    0    300 KBytes"):
    return f"[{stream}]   {second}.00-{second + 1}.00   sec  1.12 MBytes  {rate} {rest}"


END = """- - - - - - - - - - - - - - - - - - - - - - - - -
[ ID] Interval           Transfer     Bitrate         Retr
[  5]   0.00-3.00   sec   112 MBytes  27.7 Mbits/sec    0             sender
[  5]   0.00-3.04   sec   112 MBytes  27.5 Mbits/sec                  receiver

iperf Done."""
ROWS = [line(0, "40.0 Mbits/sec"), line(1, "12000 Kbits/sec"), line(2, "0.031 Gbits/sec")]


def test_text_has_a_line_for_each_interval(put):
    path = put(text([line(0, "1.00 Mbits/sec", rest="   (omitted)"), *ROWS], foot=END))
    assert sniff(path) == "iperf-text"
    assert mbits(path) == (40, 12, 31)
    assert mbits(put(text([row.replace(".00-", ".0- ", 1).replace(".00 ", ".0 ") for row in ROWS]))) == (40, 12, 31)
    stamped = [f"Wed Apr 12 10:40:2{second} 2023 {row}" for second, row in enumerate(ROWS)]  # --timestamps
    assert mbits(put(text(stamped))) == (40, 12, 31)
    # iperf's bytes have binary prefixes.
    assert mbits(put(text([line(second, "1.00 MBytes/sec") for second in range(3)]))) == (8.388608,) * 3


def test_text_of_parallel_streams_and_of_two_directions(put):
    streams = [line(second, "5.00 Mbits/sec", stream) for second in range(3) for stream in ("  5", "  7")]
    with pytest.raises(TraceError):
        read(put(text(streams)))
    summed = [row.replace("[  5]", "[SUM]") for row in ROWS]
    assert mbits(put(text([*streams, *summed]))) == (40, 12, 31)
    both = [row.replace("[  5]", "[  7][RX-C]") for row in ROWS]
    both += [line(second, "99.0 Mbits/sec", "  5").replace("[  5]", "[  5][TX-C]") for second in range(3)]
    assert mbits(put(text(both, foot=END.replace("[  5]", "[  7][RX-C]")))) == (40, 12, 31)


def test_text_of_datagrams_counts_what_arrives(put):
    head = "[ ID] Interval           Transfer     Bitrate         Total Datagrams"
    sent = [row.split("    0    300")[0] + "  906" for row in ROWS]
    lost = "[  5]   0.00-3.00   sec   112 MBytes  27.7 Mbits/sec  0.018 ms  540/906 (60%)  receiver"
    assert mbits(put(text(sent, head=head, foot=lost))) == (16, 4.8, 12.4)
    with pytest.raises(TraceError):
        read(put(text(sent, head=head)))
    got = [row.split("    0    300")[0] + "  0.018 ms  540/906 (60%)" for row in ROWS]
    assert mbits(put(text(got, head=head))) == (40, 12, 31)


def row(second, rate, stream="3", rest="", length=1.0):
    where = "10.0.0.2,40000,10.0.0.1,5001"
    return f"20230412104020,{where},{stream},{second:.1f}-{second + length:.1f},1179648,{int(rate)}{rest}"


def test_iperf2_csv(put):
    rows = [row(second, rate) for second, rate in enumerate(RATES)]
    path = put("\n".join([*rows, row(0, 2e7, length=3.0)]))
    assert sniff(path) == "iperf2-csv"
    assert mbits(path) == (40, 12, 31)
    parallel = [row(second, 1e6, stream) for second in range(3) for stream in ("3", "4")]
    sums = [row(second, rate, "-1") for second, rate in enumerate(RATES)]
    assert mbits(put("\n".join([*parallel, *sums]))) == (40, 12, 31)
    server = row(0, 2e7, rest=",0.114,540,900,60.000,0", length=3.0)
    assert mbits(put("\n".join([*rows, server]))) == (16, 4.8, 12.4)
    for wrong in ([*rows, *rows], parallel, [*rows, "not a row"]):
        with pytest.raises(TraceError):
            read(put("\n".join(wrong)), format_name="iperf2-csv")
