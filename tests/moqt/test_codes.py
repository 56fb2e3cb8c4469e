"""Every code point by its name and number, as the drafts' tables have them."""

from kvabr.moqt.codes import (
    MANDATORY_TRACK_PROPERTIES,
    Param,
    Property,
    RequestCode,
    ResetCode,
    SessionCode,
    SetupOption,
    name_of,
)
from kvabr.moqt.parameters import known_parameters
from kvabr.moqt.wire import DRAFT_18, DRAFT_20, DRAFT_22, DRAFTS, by_alpn
from tests.moqt.tables import table

SESSION = """NO_ERROR 0x0; INTERNAL_ERROR 0x1; UNAUTHORIZED 0x2; PROTOCOL_VIOLATION 0x3; INVALID_REQUEST_ID 0x4;
DUPLICATE_TRACK_ALIAS 0x5; KEY_VALUE_FORMATTING_ERROR 0x6; INVALID_PATH 0x8; MALFORMED_PATH 0x9;
GOAWAY_TIMEOUT 0x10; CONTROL_MESSAGE_TIMEOUT 0x11; DATA_STREAM_TIMEOUT 0x12; AUTH_TOKEN_CACHE_OVERFLOW 0x13;
DUPLICATE_AUTH_TOKEN_ALIAS 0x14; VERSION_NEGOTIATION_FAILED 0x15; MALFORMED_AUTH_TOKEN 0x16;
UNKNOWN_AUTH_TOKEN_ALIAS 0x17; EXPIRED_AUTH_TOKEN 0x18; INVALID_AUTHORITY 0x19; MALFORMED_AUTHORITY 0x1A;
TOO_MANY_REQUEST_UPDATES 0x1B"""
"""Draft 18, section 15.10.1; 0x1B since draft 19."""
REQUEST = """INTERNAL_ERROR 0x0; UNAUTHORIZED 0x1; TIMEOUT 0x2; NOT_SUPPORTED 0x3; MALFORMED_AUTH_TOKEN 0x4;
EXPIRED_AUTH_TOKEN 0x5; GOING_AWAY 0x6; EXCESSIVE_LOAD 0x9; DOES_NOT_EXIST 0x10; INVALID_RANGE 0x11;
MALFORMED_TRACK 0x12; DUPLICATE_SUBSCRIPTION 0x19; UNINTERESTED 0x20; PREFIX_OVERLAP 0x30; NAMESPACE_TOO_LARGE 0x31;
INVALID_JOINING_REQUEST_ID 0x32; UNSUPPORTED_EXTENSION 0x33; REDIRECT 0x34; CONFLICTING_FILTERS 0x35;
INVALID_FILTER 0x36"""
"""Draft 18, section 15.10.2. The last two since draft 19."""
RESET = """INTERNAL_ERROR 0x0; CANCELLED 0x1; DELIVERY_TIMEOUT 0x2; SESSION_CLOSED 0x3; GOING_AWAY 0x4;
TOO_FAR_BEHIND 0x5; UNKNOWN_OBJECT_STATUS 0x6; EXPIRED_AUTH_TOKEN 0x7; EXCESSIVE_LOAD 0x9; MALFORMED_TRACK 0x12"""
"""Draft 18, section 15.10.4."""
PARAMETERS = """OBJECT_DELIVERY_TIMEOUT 0x02; AUTHORIZATION_TOKEN 0x03; RENDEZVOUS_TIMEOUT 0x04;
SUBGROUP_DELIVERY_TIMEOUT 0x06; EXPIRES 0x08; LARGEST_OBJECT 0x09; FILL_TIMEOUT 0x0A; FORWARD 0x10;
SUBSCRIBER_PRIORITY 0x20; LOCATION_FILTER 0x21; GROUP_ORDER 0x22; FILL_PARAMETERS 0x23; SUBGROUP_FILTER 0x25;
OBJECTID_FILTER 0x26; PRIORITY_FILTER 0x27; OBJECT_PROPERTY_FILTER 0x28; TRACK_PROPERTY_FILTER 0x29;
NEW_GROUP_REQUEST 0x32; TRACK_NAMESPACE_PREFIX 0x34; INCLUDE_PROPERTIES 0x35"""
"""Draft 18, section 15.7, which calls 0x21 SUBSCRIPTION_FILTER; 0x23 to 0x29 and 0x35 since draft 20."""
OPTIONS = """PATH 0x01; AUTHORIZATION_TOKEN 0x03; MAX_AUTH_TOKEN_CACHE_SIZE 0x04; AUTHORITY 0x05;
MAX_FILTER_RANGES 0x06; MOQT_IMPLEMENTATION 0x07; MAX_REQUEST_UPDATES 0x08"""
"""Draft 18, section 15.4; 0x06 and 0x08 since draft 19."""
PROPERTIES = """OBJECT_DELIVERY_TIMEOUT 0x02; MAX_CACHE_DURATION 0x04; SUBGROUP_DELIVERY_TIMEOUT 0x06;
IMMUTABLE_PROPERTIES 0x0B; DEFAULT_PUBLISHER_PRIORITY 0x0E; DEFAULT_PUBLISHER_GROUP_ORDER 0x22; DYNAMIC_GROUPS 0x30;
PRIOR_GROUP_ID_GAP 0x3C; PRIOR_OBJECT_ID_GAP 0x3E"""
"""Draft 18, section 15.8."""


@table(
    ("enum", "table"),
    [
        (SessionCode, SESSION),
        (RequestCode, REQUEST),
        (ResetCode, RESET),
        (Param, PARAMETERS),
        (SetupOption, OPTIONS),
        (Property, PROPERTIES),
    ],
)
def test_tables(enum, table):
    rows = {name: int(number, 16) for name, number in (row.split() for row in table.split(";"))}
    assert {member.name: member.value for member in enum} == rows


def test_known_parameters():
    assert known_parameters(DRAFT_18) == {param for param in Param if param not in range(0x23, 0x2A) and param != 0x35}
    assert known_parameters(DRAFT_20) == known_parameters(DRAFT_22) == frozenset(Param)


def test_mandatory_track_properties():
    """Draft 18, section 2.5.1: 0x4000 to 0x7FFF."""
    assert 0x3FFF not in MANDATORY_TRACK_PROPERTIES
    assert 0x4000 in MANDATORY_TRACK_PROPERTIES
    assert 0x7FFF in MANDATORY_TRACK_PROPERTIES
    assert 0x8000 not in MANDATORY_TRACK_PROPERTIES


def test_codes_for_people():
    """Codes that nobody knows are no error (draft 18, section 14)."""
    assert name_of(0x10, RequestCode) == "DOES_NOT_EXIST"
    assert name_of(0x9D, RequestCode) == "code 0x9d"


def test_drafts():
    assert [draft.alpn for draft in DRAFTS] == ["moqt-22", "moqt-20", "moqt-18"]
    assert by_alpn("moqt-18") is DRAFT_18
    assert by_alpn("moqt-16") is None
    assert by_alpn("moqt-17") is None
