"""Control messages and data streams of MoQT: what a peer sends before it is known who it is."""

from kvabr.moqt.codes import Param, SessionFault
from kvabr.moqt.messages import MAX_MESSAGE_BYTES, MessageParser, decode, encode
from kvabr.moqt.objects import (
    MAX_PROPERTIES_BYTES,
    MalformedTrack,
    ObjectParser,
    SubgroupHeader,
    SubgroupWriter,
    read_stream_header,
    unusable,
)
from kvabr.moqt.setup_options import SetupOptions, check_target, setup_options
from kvabr.moqt.setup_options import setup_pairs as pairs_of
from kvabr.moqt.wire import (
    DRAFT_20,
    DRAFT_22,
    DRAFTS,
    Draft,
    Filter,
    Location,
    Parameters,
    Reader,
    Token,
    read_filter,
    read_pairs,
    read_parameters,
    write_filter,
    write_pairs,
    write_parameters,
)
from tests.fuzz.samples import SOME, control, data_streams, fetch_streams, subgroup_streams
from tests.fuzz.target import Target, chunks, family, refused


def _messages(draft: Draft) -> Target:
    """Return the target of a stream of messages. The first byte says how it is cut."""

    def take(data: bytes) -> bool:
        cut, data = data[:1], data[1:]
        whole = list(MessageParser().feed(data))
        parser = MessageParser()
        assert [each for piece in chunks(data, cut[0] if cut else 0) for each in parser.feed(piece)] == whole
        assert parser.buffered <= MAX_MESSAGE_BYTES + 11
        good = [_round_trip(kind, payload) for kind, payload in whole[:100]]
        return any(good)

    def _round_trip(kind: int, payload: bytes) -> bool:
        message = refused(lambda: decode(kind, payload, draft), SessionFault)
        if message is None:
            return False
        unusable(getattr(message, "properties", ()))
        if not hasattr(message, "reason"):  # reasons are repaired
            ((kind, payload),) = MessageParser().feed(encode(message, draft))
            assert decode(kind, payload, draft) == message
        return True

    return Target(take, lambda: [b"\0" + each for each in control(draft)])


def _header(data: bytes) -> bool:
    found = refused(lambda: read_stream_header(data), SessionFault)
    if found is not None and isinstance(found[1], SubgroupHeader):
        again = SubgroupWriter(found[1]).begin()
        assert read_stream_header(again) == (again[0], found[1], len(again))
    return found is not None


def _token(data: bytes) -> bool:
    found = refused(lambda: Token.decode(data), SessionFault)
    if found is not None:
        assert Token.decode(found.encode()) == found
    return found is not None


def _parameters(data: bytes) -> bool:
    good = False
    for draft in DRAFTS:
        every, reader = frozenset(Param), Reader(data)
        found = refused(lambda: read_filter(reader, draft), SessionFault)  # noqa: B023
        if found is not None:
            good = True
            again = write_parameters(Parameters(filter=found), draft)
            assert read_parameters(Reader(again), draft, every) == Parameters(filter=found)
            for largest in (None, Location(300, 1)):
                start, end = found.within(largest)
                assert end is None or end.group >= start.group
        refused(lambda: read_parameters(Reader(data), draft, every), SessionFault)  # noqa: B023
    return good


def _setup(data: bytes) -> bool:
    def read(raw: bytes) -> SetupOptions:
        return setup_options(read_pairs(Reader(raw)))

    found = refused(lambda: read(data), SessionFault)
    if found is not None:
        assert read(write_pairs(pairs_of(found))) == found
        for client in (True, False):
            refused(lambda: check_target(found, client=client), SessionFault)  # noqa: B023  # at once
    return found is not None


def _valid_setups() -> list[bytes]:
    return [write_pairs(pairs_of(SetupOptions(b"/p?token=x", b"h:1", SOME.tokens, 100, b"me", 300)))]


def _objects(*, subgroups: bool = False) -> Target:
    """Return the target of the objects of a FETCH, or of a subgroup behind the header of its stream.

    The first byte says how they are cut, and their order.
    """

    def feed(pieces: list[bytes], of: SubgroupHeader | None, *, descending: bool) -> list[object]:
        parser = ObjectParser(of, descending=descending)
        out: list[object] = []
        try:
            for piece in pieces:
                for item in parser.feed(piece):
                    if isinstance(item, memoryview):
                        item = bytes(item)  # noqa: PLW2901  # compared, and joined, by value
                    if isinstance(item, bytes) and out and isinstance(out[-1], bytes):
                        out[-1] += item
                    else:
                        out.append(item)
                assert len(parser._buffer) <= MAX_PROPERTIES_BYTES + 64
            parser.finish()
        except (SessionFault, MalformedTrack) as error:
            out.append(type(error))
        return out

    def take(data: bytes) -> bool:
        how, data = data[0] if data else 0, data[1:]
        descending, of = bool(how & 1), None
        if subgroups:
            found = refused(lambda: read_stream_header(data), SessionFault)
            if found is None or not isinstance(found[1], SubgroupHeader):
                return False
            of, data = found[1], data[found[2] :]
        cut = feed(chunks(data, how >> 1), of, descending=descending)
        whole = feed([data], of, descending=descending)
        # An error hides what came in the same piece: whatever did come out must be the same.
        bare = [item for item in whole if not isinstance(item, type)]
        assert [item for item in cut if not isinstance(item, type)][: len(bare)] == bare or isinstance(whole[-1], type)
        good = not whole or not isinstance(whole[-1], type)
        assert good == (not cut or not isinstance(cut[-1], type))
        return good

    valid = subgroup_streams if subgroups else fetch_streams
    return Target(take, lambda: [b"\x02" + each for each in valid()])


MESSAGES = family(
    _messages(DRAFT_20),
    Target(_token, lambda: [token.encode() for token in SOME.tokens]),
    Target(_parameters, lambda: [write_filter(Filter(Location(300, 1), None, 900), draft) for draft in DRAFTS]),
    Target(_setup, _valid_setups),
    _messages(DRAFT_22),
)
OBJECTS = family(
    _objects(),
    Target(_header, data_streams),
    _objects(subgroups=True),
)
