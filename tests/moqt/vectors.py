"""Control messages, byte by byte: type, parts of the payload, and what they mean. Sections are those of draft 18."""

from kvabr.moqt import messages as m
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import Filter, Location, Parameters, Token

NAME = "02 0161 026263"  # the namespace ("a", "bc")
SPACE = (b"a", b"bc")
TRACK = "0174"  # the track "t"

TOKEN = Token(b"k")
ANYWHERE = Location(0, 0)
MESSAGES = [  # in both drafts
    # SETUP, section 10.3: type 0x2F00, options to its end
    ("af00", ["01 022f61", "02 050300746f6b", "01 8400", "01 05683a343433", "02 0178"],
     m.Setup(SetupOptions(b"/a", b"h:443", (Token(b"tok"),), 1024, b"x"))),
    ("af00", [], m.Setup(SetupOptions())),
    # GOAWAY: URI, timeout
    ("10", ["03 6d3a2f", "9388"], m.Goaway(b"m:/", 5000)),
    # REQUEST_OK, section 10.5: parameters, properties
    ("07", ["00"], m.RequestOk()),
    ("07", ["02", "0805", "01 0902"], m.RequestOk(Parameters(expires=5, largest=Location(9, 2)))),
    ("07", ["00", "0464", "07 0161"], m.RequestOk(Parameters(), ((4, 100), (11, b"a")))),
    # REQUEST_ERROR, section 10.6.2: code, retry interval, reason
    ("05", ["10", "00", "046e6f6e65"], m.RequestErrorMessage(0x10, 0, "none")),
    ("05", ["09", "83e9", "00"], m.RequestErrorMessage(0x9, 1001, "")),
    # ... and Redirect, section 10.6.1: URI, namespace, track name
    ("05", ["34", "01", "00", "03 6d3a2f", NAME, TRACK],
     m.RequestErrorMessage(0x34, 1, "", m.Redirect(b"m:/", SPACE, b"t"))),
    ("05", ["34", "00", "00", "00", "00", "00"], m.RequestErrorMessage(0x34, 0, "", m.Redirect(b"", (), b""))),
    # SUBSCRIBE, section 10.7: request ID, namespace, track name, parameters
    ("03", ["00", NAME, TRACK, "08", "0264", "01 03 03006b", "010a", "0214", "0a01", "1007", "0202", "1005"],
     m.Subscribe(0, SPACE, b"t", Parameters(
         object_delivery_timeout=100, tokens=(TOKEN,), rendezvous_timeout=10, subgroup_delivery_timeout=20, forward=1,
         priority=7, group_order=2, new_group=5))),
    ("03", ["80fe", "00", "00", "00"], m.Subscribe(254, (), b"")),
    ("03", ["00", NAME, TRACK, "01", "21 00"], m.Subscribe(0, SPACE, b"t", Parameters(filter=Filter(ANYWHERE)))),
    # SUBSCRIBE_OK, section 10.8: alias, parameters, properties
    ("04", ["07", "02", "0805", "01 0902", "0e20"],
     m.SubscribeOk(7, Parameters(expires=5, largest=Location(9, 2)), ((14, 32),))),
    ("04", ["8080", "00"], m.SubscribeOk(128)),
    # REQUEST_UPDATE, section 10.9: request ID, parameters
    ("02", ["06", "01", "20 09"], m.RequestUpdate(6, Parameters(priority=9))),
    # PUBLISH, section 10.10: request ID, namespace, track name, alias, parameters, properties
    ("1d", ["02", NAME, TRACK, "05", "01", "1000", "3001"],
     m.Publish(2, SPACE, b"t", 5, Parameters(forward=0), ((0x30, 1),))),
    # PUBLISH_DONE, section 10.11: status, stream count, reason
    ("0b", ["02", "03", "026f6b"], m.PublishDone(2, 3, "ok")),
    ("0b", ["06", "ff 3fffffffffffffff", "00"], m.PublishDone(6, (1 << 62) - 1, "")),
    ("16", ["04", NAME, TRACK, "01", "21 04 05020006"], m.Fetch(4, SPACE, b"t", Location(5, 2), Location(5, 7))),
    ("16", ["04", NAME, TRACK, "01", "21 02 0502"], m.Fetch(4, SPACE, b"t", Location(5, 2), m.OPEN_END)),
    # FETCH_OK: end of track in 8 bits, the last location itself, parameters, properties
    ("18", ["01", "0580c7", "00"], m.FetchOk(True, Location(5, 200))),
    ("18", ["00", "05 ffffffffffffffffff", "00"], m.FetchOk(False, Location(5, 0))),
    ("18", ["00", "0501", "00", "22 02"], m.FetchOk(False, Location(5, 2), Parameters(), ((0x22, 2),))),
    # TRACK_STATUS, section 10.14: as SUBSCRIBE
    ("0d", ["08", NAME, TRACK, "01", "03 03 03006b"], m.TrackStatus(8, SPACE, b"t", Parameters(tokens=(TOKEN,)))),
    # PUBLISH_NAMESPACE, section 10.15
    ("06", ["0a", NAME, "00"], m.PublishNamespace(10, SPACE)),
    # NAMESPACE and NAMESPACE_DONE, sections 10.16 and 10.17
    ("08", [NAME], m.Namespace(SPACE)),
    ("08", ["00"], m.Namespace(())),
    # SUBSCRIBE_NAMESPACE, section 10.18, and SUBSCRIBE_TRACKS, section 10.19
    ("50", ["0c", "00", "00"], m.SubscribeNamespace(12, ())),
    ("50", ["0c", NAME, "01", "03 03 03006b"], m.SubscribeNamespace(12, SPACE, Parameters(tokens=(TOKEN,)))),
    ("51", ["0e", NAME, "01", "1000"], m.SubscribeTracks(14, SPACE, Parameters(forward=0))),
    # PUBLISH_STATE_NOTIFY has parameters only
    ("22", ["02", "09 0902", "07 01"], m.PublishStateNotify(Parameters(largest=Location(9, 2), forward=1))),
]  # fmt: skip


FILL = Parameters(fill_timeout=5, filter=Filter(groups_back=2), group_order=2)
MESSAGES_20 = [
    # SUBSCRIBE with a filter, FILL_PARAMETERS (a count of its own) and INCLUDE_PROPERTIES
    ("03", ["00", NAME, TRACK, "03", "21 02 0000", "02 08 03 0a05 17 01 02 0102", "12 01"],
     m.Subscribe(0, SPACE, b"t", Parameters(filter=Filter(), fill=FILL, include_properties=1))),
    # FETCH: request ID, namespace, track name, parameters, of which a filter is the range
    ("16", ["04", NAME, TRACK, "03", "0a09", "16 ff", "01 03 050001"],
     m.Fetch(4, SPACE, b"t", Location(5, 0), Location(6, 0), Parameters(fill_timeout=9, priority=255))),
    ("16", ["04", NAME, TRACK, "01", "21 00"], m.Fetch(4, SPACE, b"t", ANYWHERE, m.OPEN_END)),
    ("16", ["04", NAME, TRACK, "01", "21 01 03"],
     m.Fetch(4, SPACE, b"t", ANYWHERE, m.OPEN_END, Parameters(filter=Filter(groups_back=3)))),
    # REQUEST_UPDATE: draft 20 encodes TRACK_NAMESPACE_PREFIX with a length
    ("02", ["06", "01", "34 06" + NAME], m.RequestUpdate(6, Parameters(namespace_prefix=SPACE))),
]  # fmt: skip
MESSAGES_22 = [
    # as draft 20, but for the form of filters: a form and as many integers as it has
    ("03", ["00", NAME, TRACK, "03", "21 05", "02 08 03 0a05 17 0102 0102", "12 01"],
     m.Subscribe(0, SPACE, b"t", Parameters(filter=Filter(), fill=FILL, include_properties=1))),
    ("16", ["04", NAME, TRACK, "02", "0a09", "17 03 050001"],
     m.Fetch(4, SPACE, b"t", Location(5, 0), Location(6, 0), Parameters(fill_timeout=9))),
    ("02", ["06", "01", "34" + NAME], m.RequestUpdate(6, Parameters(namespace_prefix=SPACE))),
]  # fmt: skip
