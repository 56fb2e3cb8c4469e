"""`kvabr keys`: the key rings with which caches are sealed and opened."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvabr.types.words import counted

_EPILOG = """\
A key ring is a file, one key a line. Publishers (kvabr encode --keys, kvabr prefill --keys, the setting "keys" of
engines) seal with it what they publish: the groups, and what they lose. Any one of its keys opens that (kvabr fetch
--keys, Client(keys=...), the same setting); origins, relays, buckets and caches need none, and see names, sizes and
digests. The first key makes the keys of assets, so it is the publisher's own; give each reader a ring with a key of
its own.

  umask 077
  kvabr keys new publisher  > ring                         a ring of one key
  kvabr keys new team-a  >> ring                           another, for a tenant ...
  grep ^team-a ring > team-a.key                          ... who needs only that
  kvabr keys list ring assets                              its keys, and which of them open which asset
  kvabr encode --text F --tokens 512 --keys ring --out assets/one
  kvabr fetch moqt://origin.example/ --prompt F.json --deadline 2 --keys team-a.key --out cache.safetensors

To rotate a key, add the new one, `kvabr keys rewrap` what is published, and give it to its readers; then remove the old
one, and rewrap again. A reader who kept an asset's key can read its groups for ever: encode anew what must not be read.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Make keys that seal caches from stores and relays, and change who can open what is published."
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="new|list|rewrap")
    new = actions.add_parser("new", help="print a new key, a line for a key ring")
    new.add_argument("name", metavar="NAME", help="whose it is: letters, digits, dots, dashes and underscores")
    new.set_defaults(run=_new)
    listed = actions.add_parser("list", help="print the keys of a ring, without their secrets")
    listed.add_argument("ring", type=Path, metavar="RING", help="a key ring")
    listed.add_argument("store", nargs="?", metavar="STORE", help="also print which of its assets they open")
    listed.set_defaults(run=_list)
    rewrap = actions.add_parser("rewrap", help="let the keys of a ring open what is sealed, and no others")
    rewrap.add_argument("store", metavar="STORE", help="an asset, or a store of assets: a folder, or a bucket's URL")
    rewrap.add_argument(
        "--keys", type=Path, required=True, metavar="F", help="key ring: one of its keys must open each asset"
    )
    rewrap.set_defaults(run=_rewrap)


def _new(args: argparse.Namespace) -> int:
    from kvabr.types.sealing import new_key

    print(new_key(args.name).line())
    return 0


def _list(args: argparse.Namespace) -> int:
    from kvabr.store.locations import open_store
    from kvabr.types.errors import KvabrError
    from kvabr.types.sealing import KeyRing

    ring = KeyRing.read(args.ring)
    for number, key in enumerate(ring.keys):
        print(f"{key.id}  {key.name}{'' if number else '  (first: makes the keys of assets)'}")
    if args.store is None:
        return 0
    names, bad = {key.id: key.name for key in ring.keys}, 0
    store = open_store(args.store, must_exist=True)
    for name in sorted(store.list().versions):
        try:
            seal = store.open(name).catalog.seal
        except KvabrError as error:
            told, bad = str(error), bad + 1
        else:
            told = "not sealed" if seal is None else ", ".join(names.get(wrap.key, wrap.key) for wrap in seal.wraps)
        print(f"{name}: {told}")
    return 1 if bad else 0


def _rewrap(args: argparse.Namespace) -> int:
    from kvabr.store.admin.rewrapping import rewrap
    from kvabr.store.locations import open_store
    from kvabr.types.sealing import KeyRing

    ring = KeyRing.read(args.keys)
    done = rewrap(open_store(args.store, must_exist=True), ring)
    print(f"{counted(done.wrapped, 'asset')} wrapped anew; {done.same:,} had these keys, {done.open:,} are not sealed")
    return 0
