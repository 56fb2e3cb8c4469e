"""All targets by name, those that strangers reach first."""

from __future__ import annotations

from tests.fuzz.documents import CATALOGS, NAMES
from tests.fuzz.files import FILES, TRACES
from tests.fuzz.groups import GROUPS, PROFILES
from tests.fuzz.sessions import SESSIONS
from tests.fuzz.target import Target
from tests.fuzz.wire import MESSAGES, OBJECTS

TARGETS: dict[str, Target] = {
    "messages": MESSAGES,
    "objects": OBJECTS,
    "sessions": SESSIONS,
    "catalogs": CATALOGS,
    "names": NAMES,
    "groups": GROUPS,
    "profiles": PROFILES,
    "files": FILES,
    "traces": TRACES,
}
