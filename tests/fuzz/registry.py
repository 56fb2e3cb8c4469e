"""All targets by name, those that strangers reach first."""

from tests.fuzz.buckets import BUCKETS
from tests.fuzz.documents import CATALOGS, NAMES
from tests.fuzz.files import FILES, TRACES
from tests.fuzz.groups import GROUPS, PROFILES
from tests.fuzz.qmux import QMUX
from tests.fuzz.responses import LISTINGS, RESPONSES
from tests.fuzz.sessions import SESSIONS
from tests.fuzz.stored import STORED
from tests.fuzz.target import Target
from tests.fuzz.wire import MESSAGES, OBJECTS

TARGETS: dict[str, Target] = {
    "messages": MESSAGES,
    "objects": OBJECTS,
    "sessions": SESSIONS,
    "qmux": QMUX,
    "catalogs": CATALOGS,
    "names": NAMES,
    "responses": RESPONSES,
    "listings": LISTINGS,
    "stored": STORED,
    "buckets": BUCKETS,
    "groups": GROUPS,
    "profiles": PROFILES,
    "files": FILES,
    "traces": TRACES,
}
