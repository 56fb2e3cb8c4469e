"""Both halves of the connector for a model with windows, which has several block tables: a real origin, no vLLM."""

import pickle
from contextlib import closing

import pytest
import torch

from kvabr.engines.layouts import BlockLayout
from kvabr.engines.vllm.caches import EngineCaches, Pages
from kvabr.engines.vllm.windows import WindowCache
from kvabr.publish.frames import FrameEncoder
from kvabr.store.locations import open_asset, open_store
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import chain
from tests.client.served import Served
from tests.engines.paging import paged_blocks
from tests.engines.served import assets_of, harmed
from tests.engines.vllm.halves import BLOCK, Bench, request

pytestmark = pytest.mark.process

SPEC = KVSpec(
    "test/windows",
    "tokenizer",
    (
        LayerClass("window", (0, 1, 3), 2, 8, 8, "float16", window=40),
        LayerClass("full", (2,), 2, 8, 8, "float16"),
    ),
    16,
)
CACHES = EngineCaches(
    SPEC.classes,
    (
        Pages(0, 0, BLOCK, ("0", "3"), (0, 2), passing=True),
        Pages(1, 0, BLOCK, ("1",), (1,), passing=True),
        Pages(2, 1, BLOCK, ("2",), (0,)),
    ),
)
TOKENS = list(range(160))
TRACKS = ("FP16", "Int4")


def numbers(tokens=160, seed=0):
    """A cache of whole numbers, exact on every track but Int4."""
    out = []
    for part in SPEC.parts:
        shape = torch.Size(part.shape(tokens))
        out.append((torch.arange(shape.numel()) * 7919 % (127 + seed) - 63).float().view(shape))
    return tuple(out)


def publish(root):
    chunks = chain(TOKENS, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens)
    with open_store(root).writer(chunks[-1]) as writer:
        frames = FrameEncoder(SPEC, chunks, len(TOKENS), TRACKS, None, writer)
        frames.encode(numbers())
        losses = {"FP16": [1e-6] * len(frames.units), "Int4": [0.01] * len(frames.units)}
        seconds = {track: frames.decode_seconds(track) for track in TRACKS}
        writer.commit(frames.catalog(losses, seconds, loss_method="made up", source="test"))
    return open_asset(root)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    publish(folder / "assets")
    served = Served(folder / "assets", folder)
    yield served
    served.close()


def bench_of(served, publish=None, **options):
    return Bench(served, publish, spec=SPEC, caches=CACHES, waits=True, **options)


@pytest.fixture
def bench(served):
    bench = bench_of(served)
    yield bench
    bench.close()


def tables_of(end, more=0):
    """Block tables of a request after ``end`` tokens, as in vLLM: outside the window, block 0."""
    gone, blocks = max(0, end - 39) // BLOCK, end // BLOCK
    order = [[1 + place for place in range(blocks)], [35 - place for place in range(blocks)]]
    order.append([1 + (7 * place) % 39 for place in range(blocks + more)])
    return [[0] * gone + table[gone:] for table in order[:2]] + order[2:]


def load(bench, asked, computed=0):
    """Return the promised tokens and the tables; every load must end without failed blocks."""
    count, waits = bench.matched(asked, computed)
    assert waits == (count > 0)
    tables = tables_of(computed + count)
    bench.scheduler.allocated(asked, tables, count)
    if not count:
        return 0, tables
    assert bench.steps() == (set(), {asked.request_id}, set())
    return count, tables


def check(bench, tables, first, end, kv=None):
    """Compare the blocks of tokens ``first`` to ``end`` - 1; all others must be unchanged."""
    kv = kv or numbers()
    for pages in CACHES.pages:
        run = tables[pages.group][first // BLOCK : end // BLOCK]
        absent = pages.absent(run)
        layers = [bench.named[name] for name in pages.names]
        begin = first + absent * BLOCK
        assert begin <= max(first, end - (39 if pages.passing else end))
        wanted = kv[pages.part][list(pages.rows)][:, :, :, begin:end]
        out = torch.empty_like(wanted)
        paged_blocks(layers, run[absent:], BlockLayout.TRANSPOSED).read(out)
        assert torch.equal(out, wanted)
        others = [block for block in range(40) if block not in run[absent:]]
        assert all(bool(layer[others].isnan().all()) for layer in layers)


@pytest.mark.parametrize(("shared", "end"), [(80, 80), (100, 96), (95, 80), (160, 152)])
def test_a_prompt_that_goes_on_elsewhere_gets_the_windows_before_that(bench, shared, end):
    other = [*TOKENS[:shared], *range(900, 920)] if shared < 160 else TOKENS
    count, tables = load(bench, request(tokens=other))
    groups = shared // 16 * 16
    assert count == (end if shared == 160 else groups)
    check(bench, tables, 0, count)


@pytest.mark.parametrize("computed", [16, 40, 112, 144])
def test_what_the_engine_has_is_left_alone(bench, computed):
    count, tables = load(bench, request(tokens=[*TOKENS, 7]), computed)
    assert count == 160 - computed
    check(bench, tables, computed, 160)


def test_a_copy_that_fails_fails_the_request_and_nothing_is_asked_again(served):
    with closing(bench_of(served)) as bench:
        asked = request(tokens=[*TOKENS, 7])
        count, _ = bench.matched(asked)
        bench.scheduler.allocated(asked, tables_of(160), count)
        bench.worker._blocks = None
        assert bench.steps() == (set(), {"r"}, set())
        assert bench.worker.failed_requests() == {"r"}
        assert bench.worker.failed_requests() == set()
        assert bench.scheduler.matched(asked, 0) == (0, False)
        assert bench.scheduler._promises.held_bytes == 0


@pytest.mark.parametrize(("track", "group"), [("full", 0), ("full", 4), ("window40", 7), ("window40", 9)])
def test_whatever_is_lost_the_rest_is_computed(tmp_path, track, group):
    asset = publish(tmp_path / "assets")
    with (
        harmed(asset, group, f"FP16.{track}", "corrupt"),
        closing(Served(tmp_path / "assets", tmp_path)) as served,
        closing(bench_of(served, deadline_s=20.0)) as bench,
    ):
        asked = request(tokens=[*TOKENS, 7])
        count, tables = load(bench, asked)
        assert count < 16 * (group + 1)  # never with the group that was lost
        assert bench.worker.failed_requests() == set()
        if count:
            check(bench, tables, 0, count)
        assert bench.scheduler.matched(asked, 0) == (0, False)


def prefill(bench, asked, kv, chunk=36):
    """Compute a prompt in steps, as vLLM does: blocks fill up, and those that leave the window are freed."""
    bench.scheduler.arrived(asked)
    length = len(asked.prompt_token_ids)
    asked.num_computed_tokens = 0
    while asked.num_computed_tokens < length:
        begin = asked.num_computed_tokens
        end = min(begin + chunk, length)
        tables = tables_of(begin)
        full = tables_of(-(-end // BLOCK) * BLOCK)
        tables = [table + later[len(table) :] for table, later in zip(tables, tables_whole(end), strict=True)]
        bench.running, bench.tables = {asked.request_id: end - begin}, {asked.request_id: tables}
        for pages in CACHES.pages:
            for name, row in zip(pages.names, pages.rows, strict=True):
                for place, block in enumerate(tables[pages.group]):
                    part = kv[pages.part][row : row + 1, :, :, place * BLOCK : min((place + 1) * BLOCK, end)]
                    part = torch.nn.functional.pad(part, (0, 0, 0, BLOCK - part.shape[3]))
                    if block:
                        paged_blocks([bench.named[name]], [block], BlockLayout.TRANSPOSED).write(part)
        bench.step()
        asked.num_computed_tokens = end
        for pages, before, after in zip(CACHES.pages, tables, full, strict=True):
            gone = [block for block, left in zip(before, after, strict=False) if block and not left]
            for name in pages.names:
                bench.named[name][gone] = float("nan")  # they are other requests' from now on
    bench.running = {}
    return tables_of(length // BLOCK * BLOCK, more=1)


def tables_whole(end):
    blocks = -(-end // BLOCK)
    return [
        [1 + place for place in range(blocks)],
        [35 - place for place in range(blocks)],
        [1 + (7 * place) % 39 for place in range(blocks)],
    ]


def test_what_windows_drop_is_published_all_the_same(served, tmp_path):
    tokens, kv = [token + 500 for token in range(150)], numbers(150, seed=1)
    with closing(bench_of(served, tmp_path / "out")) as bench:
        asked = request("p", tokens)
        tables = prefill(bench, asked, kv)
        assert bench.scheduler.finished(asked, tables)
        assert bench.steps()[0] == {"p"}
        bench.published()
        assert bench.worker.counts.take()["published"] == 1
        assert open_asset(tmp_path / "out").catalog.tokens == 144
    with closing(Served(tmp_path / "out", tmp_path)) as other, closing(bench_of(other)) as bench:
        for shared in (144, 64):
            count, tables = load(bench, request(f"r{shared}", [*tokens[:shared], 1, 2]))
            assert count == shared
            check(bench, tables, 0, shared, kv)
            for layer in bench.caches:
                layer.fill_(float("nan"))


def test_what_was_not_kept_is_not_published(served, tmp_path):
    tokens = [token + 500 for token in range(150)]
    with closing(bench_of(served, tmp_path / "out")) as bench:
        bench.worker._publications._windows = WindowCache(0)
        for asked in (request("p", tokens), request("q", tokens)):
            tables = prefill(bench, asked, numbers(150)) if asked.request_id == "p" else tables_of(144, more=1)
            assert bench.scheduler.finished(asked, tables)  # of the second vLLM had all
            assert bench.steps()[0] == {asked.request_id}
            assert bench.worker.counts.take()["publish_skipped_window"] == 1
        assert not assets_of(tmp_path / "out")


def test_a_later_prompt_finds_there_what_vllm_did_not_compute_again(served, tmp_path):
    tokens, kv = [token + 500 for token in range(150)], numbers(150, seed=1)
    with closing(bench_of(served, tmp_path / "out")) as bench:
        first = request("p", tokens[:100], kv_transfer_params={"play": False})
        prefill(bench, first, kv)
        bench.scheduler.finished(first, tables_of(96, more=1))
        bench.steps()
        second = request("q", tokens)
        bench.scheduler.arrived(second)
        second.num_computed_tokens = 96  # vLLM's own prefix cache had these
        bench.running, bench.tables = {"q": 54}, {"q": tables_whole(150)}
        for pages in CACHES.pages:
            rows, run = list(pages.rows), tables_whole(150)[pages.group][:18]
            layers = [bench.named[name] for name in pages.names]
            paged_blocks(layers, run, BlockLayout.TRANSPOSED).write(kv[pages.part][rows][:, :, :, :144])
        bench.step()
        bench.running = {}
        second.num_computed_tokens = 150
        assert bench.scheduler.finished(second, tables_of(144, more=1))
        bench.steps()
        bench.published()
        assert bench.worker.counts.take()["published"] == 2


def test_a_step_travels_between_processes(served, tmp_path):
    with closing(bench_of(served, tmp_path / "out")) as bench:
        asked = request(tokens=[*TOKENS, 7])
        count, _ = bench.matched(asked)
        bench.scheduler.allocated(asked, tables_of(160), count)
        asked.num_computed_tokens = 0
        step = bench.scheduler.step({"r": 40}, {"r": tables_whole(40)}.get)
        assert step.copies
        assert step.kept
        assert pickle.loads(pickle.dumps(step)) == step  # noqa: S301  # vLLM's own way between its processes
