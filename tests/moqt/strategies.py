"""Hypothesis strategies for every message and its fields."""

from dataclasses import replace

from hypothesis import strategies as st

from kvabr.moqt import messages as m
from kvabr.moqt.codes import RANGE_FILTERS, Param, RequestCode
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import (
    DELETE,
    EVERYTHING,
    IN_FILL,
    MAX_INTEGER,
    REGISTER,
    USE_ALIAS,
    USE_VALUE,
    Filter,
    Location,
    Parameters,
    Token,
)

fields = st.binary(min_size=1, max_size=12)
namespaces = st.lists(fields, max_size=5).map(tuple)
tracks = st.binary(max_size=20)
reasons = st.text(max_size=60)


def integers() -> st.SearchStrategy[int]:
    return st.integers(0, MAX_INTEGER) | st.integers(0, 300)


def locations() -> st.SearchStrategy[Location]:
    return st.builds(Location, integers(), integers())


def tokens() -> st.SearchStrategy[Token]:
    number, value = integers(), st.binary(max_size=30)
    return st.one_of(
        st.builds(Token, value, st.just(USE_VALUE), st.none(), number),
        st.builds(Token, value, st.just(REGISTER), number, number),
        st.builds(Token, st.just(b""), st.sampled_from([DELETE, USE_ALIAS]), number),
    )


def filters() -> st.SearchStrategy[Filter]:
    relative = integers().map(lambda back: Filter(groups_back=back))
    to_group = st.tuples(locations(), integers()).map(
        lambda both: Filter(both[0], None, min(MAX_INTEGER, both[0].group + both[1]))
    )
    to_object = st.tuples(to_group, integers()).map(lambda both: replace(both[0], end_object=both[1]))
    fixed = st.sampled_from([Filter(groups_back=0), Filter(), EVERYTHING])
    return st.one_of(fixed, relative, locations().map(Filter), to_group, to_object)


def range_filters(which: frozenset[Param]) -> st.SearchStrategy[tuple[tuple[Param, bytes], ...]]:
    if not which:
        return st.just(())
    one = st.tuples(st.sampled_from(sorted(which)), st.binary(max_size=8))
    return st.lists(one, max_size=3).map(lambda found: tuple(sorted(found, key=lambda each: each[0])))


def properties() -> st.SearchStrategy[tuple[tuple[int, int | bytes], ...]]:
    pair = st.integers(0x40, 0x3FFF).flatmap(
        lambda kind: st.tuples(st.just(kind), st.binary(max_size=20) if kind % 2 else integers())
    )
    return st.lists(pair, max_size=4).map(lambda pairs: tuple(sorted(pairs, key=lambda pair: pair[0])))


def parameters(allowed: frozenset[Param]) -> st.SearchStrategy[Parameters]:
    number = integers()
    how = {
        Param.OBJECT_DELIVERY_TIMEOUT: ("object_delivery_timeout", st.integers(1, MAX_INTEGER)),
        Param.AUTHORIZATION_TOKEN: ("tokens", st.lists(tokens(), max_size=3).map(tuple)),
        Param.RENDEZVOUS_TIMEOUT: ("rendezvous_timeout", number),
        Param.SUBGROUP_DELIVERY_TIMEOUT: ("subgroup_delivery_timeout", number),
        Param.EXPIRES: ("expires", number),
        Param.MAX_OBJECT: ("largest", locations()),
        Param.FILL_TIMEOUT: ("fill_timeout", number),
        Param.FORWARD: ("forward", st.integers(0, 1)),
        Param.SUBSCRIBER_PRIORITY: ("priority", st.integers(0, 255)),
        Param.LOCATION_FILTER: ("filter", filters()),
        Param.GROUP_ORDER: ("group_order", st.integers(1, 2)),
        Param.NEW_GROUP_REQUEST: ("new_group", number),
        Param.TRACK_NAMESPACE_PREFIX: ("namespace_prefix", namespaces),
        Param.INCLUDE_PROPERTIES: ("include_properties", st.integers(0, 1)),
        **dict.fromkeys(RANGE_FILTERS, ("range_filters", range_filters(allowed & RANGE_FILTERS))),
    }
    if Param.FILL_PARAMETERS in allowed:
        how[Param.FILL_PARAMETERS] = ("fill", parameters(IN_FILL))
    assert set(how) | {Param.FILL_PARAMETERS} == set(Param)
    several = ("tokens", "range_filters")
    usable = [how[param] for param in Param if param in allowed]
    return st.builds(Parameters, **{name: value if name in several else st.none() | value for name, value in usable})


def setups() -> st.SearchStrategy[SetupOptions]:
    return st.builds(
        SetupOptions,
        path=st.none() | st.binary(max_size=30),
        authority=st.none() | st.binary(max_size=30),
        tokens=st.lists(tokens(), max_size=2).map(tuple),
        max_auth_token_cache_size=integers(),
        implementation=st.none() | st.binary(max_size=30),
    )


def ranges() -> st.SearchStrategy[tuple[Location, Location]]:
    return st.tuples(locations(), locations()).map(lambda both: (min(both), max(both)))


def message() -> st.SearchStrategy[m.Message]:
    """Any message; answers have the request ID that decoding yields."""
    number = integers()

    def given(cls: type[m.Message]) -> st.SearchStrategy[Parameters]:
        return parameters(cls.allowed)

    def fetch(number: int, space: tuple[bytes, ...], track: bytes, both: tuple[Location, ...], more: Parameters):
        start, end = both
        found = more.filter or m.fetch_filter(start, end)  # in the form that decoding yields
        start, end = (Location(0, 0), m.OPEN_END) if found.start is None else m.fetched_range(found)
        more = replace(more, filter=found if found.start is None else None)
        return m.Fetch(number, space, track, start, end, more)

    props = properties()
    common = [
        st.builds(m.Setup, setups()),
        st.builds(m.RequestOk, given(m.RequestOk), props),
        st.builds(
            m.RequestErrorMessage, number.filter(lambda code: code != RequestCode.REDIRECT), number, reasons
        ),
        st.builds(m.Subscribe, number, namespaces, tracks, given(m.Subscribe)),
        st.builds(m.TrackStatus, number, namespaces, tracks, given(m.TrackStatus)),
        st.builds(m.SubscribeOk, number, given(m.SubscribeOk), props),
        st.builds(m.RequestUpdate, number, given(m.RequestUpdate)),
        st.builds(m.Publish, number, namespaces, tracks, number, given(m.Publish), props),
        st.builds(m.PublishDone, number, number, reasons),
        st.builds(fetch, number, namespaces, tracks, ranges(), given(m.Fetch)),
        st.builds(m.FetchOk, st.booleans(), locations(), st.just(Parameters()), props),
        st.builds(m.PublishNamespace, number, namespaces, given(m.PublishNamespace)),
        st.builds(m.Namespace, namespaces),
        st.builds(m.SubscribeNamespace, number, namespaces, given(m.SubscribeNamespace)),
    ]  # fmt: skip
    to = st.builds(m.Redirect, st.binary(max_size=40), namespaces, tracks)
    return st.one_of(
        *common,
        st.builds(m.Goaway, st.binary(max_size=40), number),
        st.builds(m.PublishStateNotify, given(m.PublishStateNotify)),
        st.builds(m.RequestErrorMessage, st.just(0x34), number, reasons, to),
        st.builds(m.SubscribeTracks, number, namespaces, given(m.SubscribeTracks)),
    )
