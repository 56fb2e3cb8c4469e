"""Sealed caches: who has a key plays them as if they were open, and who has none hears why, and computes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvabr.cli.main import main
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.player.assembler import Assembler, Layer
from kvabr.publish.publisher import Publisher
from kvabr.replay.verify import load_profile
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.asset_folder import FolderAsset
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PlayError, SealedError
from kvabr.types.live import LiveCatalog, LiveEnd, PublishedFrames, parse_edge, published_catalog
from kvabr.types.naming import chain
from kvabr.types.passage import Exact, Passage
from kvabr.types.sealing import KeyRing
from tests.client.live import Producer, origin, working
from tests.client.playing import connection
from tests.client.sealed import READER, RING, STRANGER, TOKENS, TRACKS, played
from tests.client.virtual import virtual
from tests.toymodel import SPEC, ToyModel, toy_asset, toy_passage

NAMES = {"model": SPEC.model, "tokenizer": SPEC.tokenizer, "group_tokens": SPEC.group_tokens}
COST = PrefillCost(0.001, 0.0001)


@virtual
async def test_a_sealed_cache_plays_like_an_open_one(both):
    pairs = (("open", None), ("sealed", READER))
    plain, sealed = [await played(both / name, keys, "anytime") for name, keys in pairs]
    assert sealed.coverage == plain.coverage
    assert torch.equal(sealed.kv, plain.kv)
    assert sealed.loss == plain.loss


@pytest.mark.parametrize("together", [True, False])
def test_layers_are_opened_each_for_itself(both, together):
    caches = []
    for name in ("open", "sealed"):
        asset = FolderAsset.open(both / name / "asset")
        assembler = Assembler(asset.catalog.opened(READER), load_profile(asset), dtype=torch.float32)
        for group in range(asset.catalog.groups):
            base, top = (Layer(track, asset.frame(group, track)) for track in ("AC-L0", "AC-L1"))
            if not together:
                assembler.put(group, base.track, base.frame)
            assembler.put(group, top.track, top.frame, below=[base] if together else ())
        caches.append(assembler.take())
    assert torch.equal(*caches)


@virtual
@pytest.mark.parametrize("keys", [None, STRANGER])
async def test_without_a_key_the_reason_is_told_and_an_engine_computes(both, keys):
    with pytest.raises(PlayError, match=rf"sealed.*{RING.keys[0].id}"):
        await played(both / "sealed", keys, "anytime")
    options = PlayOptions(prefill_cost=PrefillCost(0.1, 0.01))
    async with connection(PublishedAssets(both / "sealed")) as link:
        client = AsyncClient(link, keys=keys, engine=ToyModel(), options=options)
        computed = await client.play(TOKENS, deadline=4.0)
        await client.close()
    assert set(computed.coverage) == {"recomputed"}


def test_nothing_of_the_prompt_or_the_losses_is_in_the_folder(both):
    plain, sealed = (FolderAsset.open(both / name / "asset") for name in ("open", "sealed"))
    assert sealed.catalog.seal is not None
    assert all(not any(track.loss) for track in sealed.catalog.tracks)
    for track in TRACKS:
        one, other = bytes(plain.frame(0, track)), bytes(sealed.frame(0, track))
        assert len(other) == len(one) + 28
        assert one[-64:] not in other


@virtual
async def test_a_group_that_was_not_sealed_is_refused(both):
    """A store cannot put an open frame in the place of a sealed one, even if it could change the digests."""
    async with connection(PublishedAssets(both / "open")) as link:
        client = AsyncClient(link)
        found = await client.find(TOKENS, model=SPEC)
        with pytest.raises(SealedError, match="plays sealed ones alone"):
            await AsyncClient(link, keys=RING).find(TOKENS, model=SPEC)
        forged = replace(found, catalog=replace(found.catalog, key=RING.asset_key(found.catalog.chunks[0])))
        with pytest.raises(PlayError, match="not sealed, but the catalog is"):
            await client.play_asset(forged, deadline=2.0, options=PlayOptions(policy="fixed:FP16"))
        await client.close()


@virtual
async def test_a_sealed_cache_is_played_while_it_is_prefilled(tmp_path):
    for name, keys in (("open", None), ("sealed", RING)):
        toy_asset(tmp_path / name / "asset", ("FP16", "Int4"), tokens=160, keys=keys)
    published = FolderAsset.open(tmp_path / "sealed" / "asset")
    asset = SimpleNamespace(catalog=published.catalog.opened(RING), frame=published.frame)
    producer = Producer(asset)
    assert not any(map(any, (track.loss for track in LiveCatalog.loads(producer.live.dumps().encode()).catalog.tracks)))
    for keys in (READER, None):
        async with origin(producer) as link, working(producer, 1.0):
            client = AsyncClient(link, keys=keys)
            options = PlayOptions(policy="fixed:FP16", live=True)
            if keys is None:
                with pytest.raises(PlayError, match="sealed"):
                    await client.play(TOKENS, deadline=20.0, model=SPEC, options=options)
            else:
                live = await client.play(TOKENS, deadline=20.0, model=SPEC, options=options)
                assert set(live.coverage) == {"Int4"}  # a live play has the base of each group pushed
                assert torch.equal(live.kv, (await played(tmp_path / "open", None, "fixed:Int4")).kv)
                assert live.loss > 0
            await client.close()


@virtual
@pytest.mark.parametrize("forged", ["times", "news"])
async def test_a_relay_cannot_change_what_is_told_of_a_growing_cache(both, forged):
    published = FolderAsset.open(both / "sealed" / "asset")
    asset = SimpleNamespace(catalog=published.catalog.opened(RING), frame=published.frame)
    producer = Producer(asset)
    if forged == "times":
        head, _, rest = producer.live.dumps().partition("\n")
        late = {**json.loads(head), "seconds": [2.0 * time_s for time_s in producer.live.seconds]}
        producer.live = LiveCatalog.loads(f"{json.dumps(late)}\n{rest}".encode())
    else:
        told, add = [], producer.news.append

        def append(data):
            news = parse_edge(data)
            told.append(news)
            late = news if isinstance(news, LiveEnd) or len(told) <= 5 else replace(news, rest_s=1.0)
            add(late.dumps())

        producer.news.append = append
    async with origin(producer) as link, working(producer, 1.0):
        client = AsyncClient(link, keys=READER)
        play = client.play(TOKENS, deadline=15.0, model=SPEC, options=PlayOptions(policy="fixed:FP16", live=True))
        if forged == "times":
            with pytest.raises(PlayError, match="live catalog: it is not from who sealed this asset"):
                await play
        else:
            with pytest.raises(PlayError, match=r"news of group 5: it is not from who sealed this asset"):
                await play
        await client.close()


def test_what_a_killed_producer_published_can_be_opened(both):
    """A server without the key makes it an asset: the runs say what it loses."""
    whole = FolderAsset.open(both / "sealed" / "asset").catalog
    live = LiveCatalog(whole, tuple(range(10)), "0" * 16)
    news = []
    for group in range(6):
        frames = {track.name: (track.bytes[group], track.digests[group]) for track in whole.tracks}
        news.append(PublishedFrames("0" * 16, group, 0.0, frames))
    short = Catalog.loads(published_catalog(live, news).dumps()).opened(READER)
    assert short.tokens == 96
    assert short.tracks[0].loss == whole.opened(READER).tracks[0].loss[:6]
    news[5].frames.pop("AC-L1")
    assert published_catalog(live, news).tokens == 80


@virtual
async def test_passages_of_several_publishers_are_joined_behind_a_sealed_prefix(tmp_path):
    """The tenant's key opens what two publishers have sealed; what is open it does not play."""
    system, bare = Exact(TOKENS[:32]), Passage(TOKENS[90:])
    ours, theirs = Passage(TOKENS[32:60]), Passage(TOKENS[60:90])
    other = KeyRing((*STRANGER.keys, *READER.keys))
    for name, rings in (("open", (None, None, None)), ("sealed", (RING, RING, other))):
        toy_asset(tmp_path / name / "system", ("FP16", "Int4"), tokens=32, keys=rings[0])
        for passage, ring, loss in ((ours, rings[1], 0.05), (theirs, rings[2], 0.02)):
            notes = {"fusion": ((0.0, loss),), "order": bytes(len(passage.ids))}
            path = tmp_path / name / passage.name(SPEC).prompt
            made = toy_passage(path, passage.ids, ("FP16", "Int4"), keys=ring, **notes).catalog
            assert made.passage.fusion == (() if ring else notes["fusion"])
        toy_passage(tmp_path / name / "bare", bare.ids, ("FP16", "Int4"))
    parts, told = (system, ours, theirs, bare, Exact((5, 6))), []
    blends, prefixes = [], []
    for name, keys in (("open", None), ("sealed", READER)):
        async with connection(PublishedAssets(tmp_path / name)) as link:
            client = AsyncClient(link, keys=keys, options=PlayOptions(policy="fixed:FP16", prefill_cost=COST, tail=0))
            some = parts if keys is not None else (system, ours, theirs, Exact(bare.ids), Exact((5, 6)))
            options = replace(client.options, watch=told.append)
            blends.append(await client.play(deadline=2.0, parts=some, engine=ToyModel(), model=SPEC, options=options))
            found, refused = await client.find_joined(some[:4], SPEC)
            prefixes.append(found.catalog)
            await client.close()
    assert torch.equal(blends[0].kv, blends[1].kv)
    assert blends[0].fusion_loss == blends[1].fusion_loss == pytest.approx(0.07)
    assert [why for passage, why in refused if passage == bare] == [
        "this cache is not sealed, and a client with keys plays sealed ones alone"
    ]
    assert prefixes[0].tokens == prefixes[1].tokens == 90
    assert prefixes[0].tracks[0].loss == prefixes[1].tracks[0].loss
    async with connection(PublishedAssets(tmp_path / "sealed")) as link:
        client = AsyncClient(link, options=PlayOptions(prefill_cost=COST))
        found, refused = await client.find_joined(parts, SPEC)
        assert [passage for passage, why in refused if "it is sealed for the keys" in why] == [ours, theirs]
        await client.close()


def test_engines_publish_sealed_and_share_groups(both, tmp_path):
    """Two prompts that begin alike have the same frames, so stores keep them once."""
    (ring := tmp_path / "ring").write_text("".join(f"{key.line()}\n" for key in RING.keys))
    prior = FolderAsset.open(both / "open" / "asset").catalog
    digests = []
    for count in (64, 96):
        publisher = Publisher(tmp_path / "assets", SPEC, prior=prior, tracks=("FP16",), keys=ring)
        slot = publisher.reserve(TOKENS[:count])
        slot.fill(ToyModel().prefill(TOKENS[:96])[:, :, :, :count].contiguous(), lambda _: None)
        publisher.close()
        catalog = FolderAsset.open(tmp_path / "assets" / chain(TOKENS[:count], **NAMES)[-1]).catalog.opened(READER)
        assert any(catalog.track("FP16").loss)
        digests.append(catalog.track("FP16").digests[:4])
    assert digests[0] == digests[1]


def test_keys_are_rotated_without_encoding_anew(both, tmp_path, capsys):
    asset = tmp_path / "assets" / "one"
    shutil.copytree(both / "sealed" / "asset", asset)
    assert main(["keys", "new", "next"]) == 0
    line = capsys.readouterr().out
    (ring := tmp_path / "ring").write_text(f"{line}{RING.keys[0].line()}\n")
    assert main(["inspect", str(asset), "--keys", str(ring)]) == 0
    capsys.readouterr()
    for told in ("1 asset wrapped anew; 0 had these keys", "0 assets wrapped anew; 1 had these keys"):
        assert main(["keys", "rewrap", str(asset.parent), "--keys", str(ring)]) == 0
        assert told in capsys.readouterr().out
    catalog = FolderAsset.open(asset).catalog
    with pytest.raises(SealedError):
        catalog.opened(READER)
    ring.write_text(line)
    assert catalog.opened(KeyRing.read(ring)) == FolderAsset.open(both / "sealed" / "asset").catalog.opened(RING)
    (ring := tmp_path / "stranger").write_text(STRANGER.keys[0].line())
    assert main(["keys", "rewrap", str(asset.parent), "--keys", str(ring)]) == 1
    assert "it is sealed for the keys" in capsys.readouterr().err
    for name in ("aa", "zz"):  # of another publisher, on either side
        toy_asset(asset.parent / name, ("FP16",), keys=STRANGER)
    (ring := tmp_path / "all").write_text("\n".join(key.line() for key in RING.keys))
    assert main(["keys", "rewrap", str(asset.parent), "--keys", str(ring)]) == 1
    told = capsys.readouterr().err
    assert f"{asset.parent / 'aa'}" in told
    assert "1 more asset cannot be opened; 1 other wrapped anew" in told
    assert FolderAsset.open(asset).catalog.opened(READER)
    for name in ("aa", "zz"):
        shutil.rmtree(asset.parent / name)
    assert main(["keys", "rewrap", str(tmp_path / "nowhere"), "--keys", str(ring)]) == 2
    assert main(["store", "verify", "--deep", str(asset.parent)]) == 0
