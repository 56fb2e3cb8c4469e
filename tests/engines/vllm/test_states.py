"""Recurrent states in vLLM's blocks: how they are published, kept and played. Without vLLM, with a real origin."""

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from kvabr.engines.vllm.caches import EngineCaches, Pages, Quantisation, UnknownCacheError, engine_caches
from kvabr.engines.vllm.snapshots import Boundaries, StateCache
from kvabr.engines.vllm.states import StateForm, forms_of
from kvabr.store.locations import open_asset
from kvabr.types.kv import KVSpec, LayerClass
from tests.client.served import Served
from tests.engines.served import harmed
from tests.engines.vllm.halves import BLOCK, Bench, request

pytestmark = pytest.mark.process

CONVOLUTION = StateForm("convolution", (3, 12), torch.float16)
RECURRENT = StateForm("recurrent", (2, 6, 4), torch.float32, 72, turned=True)
SPEC = KVSpec(
    "test/states",
    "tokenizer",
    (
        LayerClass("state", (0, 2), 1, 12, 4, "float16", role="convolution"),
        LayerClass("state", (0, 2), 2, 4, 6, "float32", role="recurrent"),
        LayerClass("full", (1,), 2, 8, 8, "float16"),
    ),
    16,
)
CACHES = EngineCaches(
    SPEC.classes,
    (
        Pages(0, 0, BLOCK, ("0",), (0,), form=CONVOLUTION),
        Pages(0, 1, BLOCK, ("0",), (0,), form=RECURRENT),
        Pages(1, 0, BLOCK, ("2",), (1,), form=CONVOLUTION),
        Pages(1, 1, BLOCK, ("2",), (1,), form=RECURRENT),
        Pages(2, 2, BLOCK, ("1",), (0,)),
    ),
)
TOKENS = list(range(70))


def layer(kind="GDN_ATTN", shapes=((3, 12), (2, 6, 4)), mode="align", **fields):
    given = {"dtypes": (torch.float16, torch.float32), "block_size": BLOCK, "num_speculative_blocks": 0}
    title = type("MambaSpec", (SimpleNamespace,), {})
    return title(mamba_type=SimpleNamespace(name=kind), shapes=shapes, mamba_cache_mode=mode, **given | fields)


def caches(*specs, **more):
    groups = [
        SimpleNamespace(layer_names=[f"model.layers.{number}.mixer"], kv_cache_spec=each)
        for number, each in enumerate(specs)
    ]
    config = SimpleNamespace(kv_cache_groups=groups)
    return engine_caches(config, layers=range(len(specs)), dtype="float16", held=torch.float16, **more)


def test_states_are_classes_as_transformers_has_them():
    found = caches(layer(), layer("MAMBA2", ((12, 3), (2, 6, 4))))
    assert [(one.title, one.layers, one.heads, one.k_dim, one.v_dim, one.dtype) for one in found.classes] == [
        ("state-convolution", (0, 1), 1, 12, 4, "float16"),
        ("state-recurrent", (0,), 2, 4, 6, "float32"),
        ("state-recurrent", (1,), 2, 6, 4, "float32"),
    ]
    assert found.states == {0: BLOCK, 1: BLOCK}
    assert found.passing == ()


@pytest.mark.parametrize(
    ("kept", "what"),
    [
        (layer("MAMBA1"), "as states of MAMBA1; kvabr supports GDN_ATTN, MAMBA2, SHORT_CONV"),
        (layer(shapes=((3, 12),)), "as states of GDN_ATTN"),
        (layer(mode="none"), 'in the mode "none", .* start it with --enable-prefix-caching'),
        (layer(num_speculative_blocks=1), "without speculative decoding"),
        (layer(dtypes=(torch.bfloat16, torch.float32)), "a state of model.layers.0.mixer in torch.bfloat16"),
    ],
)
def test_states_that_are_left_to_vllm(kept, what):
    with pytest.raises(UnknownCacheError, match=what):
        caches(kept)


def test_states_of_16_bits_beside_a_quantised_cache_are_left_to_vllm():
    with pytest.raises(UnknownCacheError, match=r"in float16 next to a quantised cache, .* --kv-cache-dtype auto"):
        caches(layer(), quantisation=Quantisation("float8_e4m3fn"))


@pytest.mark.parametrize("form", [CONVOLUTION, StateForm("convolution", (12, 3), torch.float16), RECURRENT])
def test_what_is_read_is_written_again(form):
    states = torch.randn(4, *form.shape)
    out = torch.full(form.published, float("nan"))
    form.read(states, 2, out)
    assert not out.isnan().any()
    copy = torch.zeros_like(states)
    form.write(copy, 1, out)
    assert torch.equal(copy[1], states[2])
    if form.role == "convolution":
        assert bool((out[..., 0] == 0).all())  # the oldest input is not read again


def test_rows_and_columns_of_a_gated_delta_state_are_exchanged_on_a_gpu():
    _, form = forms_of(layer(), cpu=False)
    assert form == RECURRENT
    states, out = torch.randn(1, *form.shape), torch.empty(form.published)
    form.read(states, 0, out)
    assert torch.equal(out, states[0].transpose(1, 2))
    _, form = forms_of(layer(), cpu=True)
    assert form.published == RECURRENT.published
    states = torch.randn(1, *form.shape)
    form.read(states, 0, out)
    assert torch.equal(out, states[0])


def boundaries(prompt, computed=0):
    made = Boundaries(BLOCK, 16, lambda _: ("a", "b", "c", "d"))
    asked = SimpleNamespace(request_id="r", num_computed_tokens=computed, num_prompt_tokens=prompt)
    made.arrived(asked)
    return made, asked


def test_the_step_that_ends_behind_the_last_group_leaves_a_state():
    made, asked = boundaries(70)
    table = [0, 3, 0, 0, 0, 5, 0, 9, 10]
    told = []
    for tokens in (32, 32, 6, 1):
        told += made.step({"r": tokens}, lambda _: (table, table), {0: BLOCK, 1: BLOCK})
        asked.num_computed_tokens += tokens
    assert [(one.chunk, one.blocks) for one in told] == [("d", {0: 9, 1: 9})]


@pytest.mark.parametrize(
    ("prompt", "computed", "table", "kept"),
    [
        (70, 64, [0] * 7 + [4, 5], True),  # vLLM had the state itself
        (70, 68, [0] * 7 + [4, 5], False),  # it begins behind it
        (70, 0, [0] * 7 + [0, 5], False),  # it was not left
        (15, 0, [1, 2], False),  # too short
        (16, 0, [1, 2], False),  # one token must come behind a state
    ],
)
def test_where_there_is_a_state(prompt, computed, table, kept):
    made, asked = boundaries(prompt, computed)
    told = made.step({"r": prompt - computed}, lambda _: (table,), {0: BLOCK})
    assert bool(told) == kept
    assert made.end(asked) == (64 if prompt == 70 else 0)
    made.over("r")
    assert made.step({"r": 1}, lambda _: (table,), {0: BLOCK}) == []


def test_the_oldest_snapshots_go_first():
    kept = StateCache(100)
    for chunk in "abc":
        kept.keep(chunk, {0: torch.zeros(10)})
    assert kept.take("a") is None
    assert kept.take("b") is not None
    kept.keep("b", {0: torch.zeros(10)})
    kept.keep("d", {0: torch.zeros(10)})
    assert kept.take("c") is None
    assert kept.take("b") is not None


def bench_of(served, publish=None, **options):
    return Bench(
        served, publish, spec=SPEC, caches=CACHES, waits=True, tracks=["Raw"], **{"policy": "fixed:Raw", **options}
    )


def fill(bench, seed):
    dice = torch.Generator().manual_seed(seed)
    bench.named["1"].copy_(torch.randn(bench.named["1"].shape, generator=dice).to(torch.float16))
    for name in "02":
        for one in states_of(bench, name):
            one.copy_(torch.randn(one.shape, generator=dice).to(torch.float16))


def states_of(bench, name):
    return [form.of(bench.named[name]) for form in (CONVOLUTION, RECURRENT)]


TABLES = ([0] * 7 + [21, 22], [0] * 7 + [23, 24], list(range(1, 10)))
OTHERS = ([0] * 7 + [31, 32], [0] * 7 + [33, 34], list(range(10, 19)))


@pytest.fixture
def served(tmp_path):
    """An origin of what one engine has published."""
    (tmp_path / "none").mkdir()
    with closing(Served(tmp_path / "none", tmp_path)) as empty, closing(bench_of(empty, tmp_path / "assets")) as bench:
        fill(bench, 1)
        asked = request("p", TOKENS)
        asked.num_computed_tokens = 0
        bench.scheduler.arrived(asked)
        for tokens in (64, 6):
            bench.running, bench.tables = {"p": tokens}, {"p": TABLES}
            bench.step()
            asked.num_computed_tokens += tokens
            if tokens == 64:  # the next step goes on from a copy, and then the block is another request's
                bench.named["0"][21] = bench.named["2"][23] = -1
        bench.running = {}
        assert bench.scheduler.finished(asked, TABLES)
        assert bench.steps()[0] == {"p"}
        bench.published()
        assert bench.worker.counts.take()["published"] == 1
    served = Served(tmp_path / "assets", tmp_path)
    yield served
    served.close()


@pytest.mark.parametrize("beyond", [[], [1, 2, 3]])
def test_what_one_engine_left_another_begins_with(served, beyond):
    source = bench_of(served)
    fill(source, 1)
    bench = bench_of(served)
    try:
        asked = request(tokens=[*TOKENS[:64], 99, *beyond])
        count, waits = bench.matched(asked)
        assert (count, waits) == (64, True)
        bench.scheduler.allocated(asked, OTHERS, count)
        assert bench.steps() == (set(), {"r"}, set())
        assert bench.worker.failed_requests() == set()
        for name, block, other in (("0", 21, 31), ("2", 23, 33)):
            for had, has in zip(states_of(source, name), states_of(bench, name), strict=True):
                assert torch.equal(has[other], had[block])
                assert bool(has[:31].isnan().all())
        assert torch.equal(bench.named["1"][10:18], source.named["1"][1:9])
    finally:
        source.close()
        bench.close()


@pytest.mark.parametrize("tokens", [TOKENS[:64], [*TOKENS[:60], 1, 2, 3, 4, 5, 6], TOKENS[:50]])
def test_a_prompt_that_ends_or_turns_before_the_state_is_computed(served, tokens):
    with closing(bench_of(served)) as bench:
        assert bench.matched(request(tokens=tokens)) == (0, False)


def test_a_state_that_was_played_with_losses_is_not_kept(served, tmp_path):
    with closing(bench_of(served, tmp_path / "out", policy="fixed:Raw")) as bench:
        asked = request(tokens=[*TOKENS[:64], 99])
        count, _ = bench.matched(asked)
        bench.scheduler.allocated(asked, OTHERS, count)
        bench.steps()
        for lossy in (True, False):
            if lossy:  # as a track with losses would be
                bench.worker.lossy.note(asked.prompt_token_ids, b"", range(64))
            again = request(f"r{lossy}", tokens=asked.prompt_token_ids, num_computed_tokens=64)
            bench.scheduler.arrived(again)
            bench.running, bench.tables = {again.request_id: 1}, {again.request_id: OTHERS}
            bench.step()
            bench.running = {}
            assert bool(bench.worker._publications._states._kept) != lossy
            bench.worker.lossy.clear()


def test_a_damaged_state_is_computed(served, tmp_path):
    asset = open_asset(tmp_path / "assets")
    with harmed(asset, 0, "Raw.state-recurrent", "corrupt"), closing(bench_of(served)) as bench:
        asked = request(tokens=[*TOKENS[:64], 99])
        count, _ = bench.matched(asked)
        assert count == 0
