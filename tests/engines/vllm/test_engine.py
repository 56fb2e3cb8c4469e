"""End to end with the real vLLM on this machine's processor; see tools/engine vllm. States the version that it ran."""

import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from kvabr.engines.generation import Generation
from kvabr.engines.vllm import ADAPTER
from kvabr.engines.vllm.config import VllmSettings
from kvabr.replay.trace import BYTES_PER_MBIT, Trace
from kvabr.store.locations import open_store
from kvabr_lab.live.packet_schedule import Conditions
from kvabr_lab.live.shaper import Shaper
from tests.engines.served import assets_of, harmed
from tests.engines.smollm2_folder import smollm2_folder
from tests.engines.vllm.engine import TEXT, RealEngine, prompts_of
from tests.engines.vllm.halves import LONGEST
from tests.engines.vllm.world import VllmWorld

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("settled")]

DEADLINE_S = 60.0
"""Enough for 16 caches through a machine that has other things to do."""
MORE_S = 10.0
"""What a busy machine may take beside what it was measured to take."""


def constant(mbit):
    return Trace(f"constant/{mbit}", "constant", (0.0,), (mbit * BYTES_PER_MBIT,), 1000.0)


class World(VllmWorld):
    """One engine, one origin behind a link, and the answers to 16 prompts when vLLM computes everything."""

    def __init__(self, folder):
        super().__init__(folder)
        model = Path(os.environ.get("KVABR_SMOLLM2") or folder / "smollm2")
        names = smollm2_folder(model)
        self.link = Shaper(self.origin.address, Conditions(rtt_s=0.01))
        url = f"moqt://127.0.0.1:{self.link.address[1]}/"
        own = {"player": "inside"}  # where tests look into the client
        extra = self.playing(url=url, deadline_s=DEADLINE_S, **names, **own) | self.publishing("FP16")
        self.engine = RealEngine(model, extra)
        self.prompts = prompts_of(self.engine.tokens(TEXT))
        self.cold = []
        began_s = time.monotonic()
        for prompt in self.prompts:  # one at a time, and nothing kept: nothing but the model decides what it says
            self.cold += self.engine.generate([prompt], kv_transfer_params={"play": False})
            self.engine.forget()
        self.cold_s = time.monotonic() - began_s
        self.engine.counted()

    def asset_of(self, prompt):
        """The asset that a prompt's own computation made."""
        from kvabr.types.naming import chain

        spec = self.engine.half._model.spec
        groups = len(prompt) // spec.group_tokens
        name = chain(prompt[: groups * spec.group_tokens], model=spec.model, tokenizer=spec.tokenizer)[-1]
        return open_store(self.assets).open(name)

    def run(self, prompts=None, **params):
        """All prompts at once, with nothing in vLLM's own cache."""
        self.engine.forget()
        self.engine.counted()
        began_s = time.monotonic()
        texts = self.engine.generate(self.prompts if prompts is None else prompts, **params)
        return texts, self.engine.counted(), time.monotonic() - began_s

    def close(self):
        super().close()
        self.link.close()


@pytest.fixture(autouse=True)
def open_link(world):
    world.link.open(Conditions(rtt_s=0.01))


def test_says_which_version_it_ran(record_property):
    import vllm

    record_property("vllm", vllm.__version__)
    print(f"vLLM {vllm.__version__}")
    assert ADAPTER.check(vllm.__version__)


def test_the_tail_is_computed_with_the_question(world, tmp_path, monkeypatch):
    """Of exact caches the text is that of a prompt that was computed, whatever of them is left to vLLM."""
    world.origin.wait_for_assets(16)
    (tmp_path / "longest.py").write_text(LONGEST)
    monkeypatch.setattr(VllmSettings, "tail", 256)
    for half in (world.engine.half, world.engine.worker):
        own = half._settings.model_copy(update={"policy": f"{tmp_path / 'longest.py'}:Longest"})
        monkeypatch.setattr(half, "_settings", own)
    texts, counted, _ = world.run(world.prompts[:4])
    assert texts == world.cold[:4]
    assert counted["plays"] == 4
    assert counted.get("plays_cut", 0) == 0
    assert counted["tokens_tail"] >= 4 * 256
    assert 0 < counted["tokens_loaded"] <= sum(map(len, world.prompts[:4])) - counted["tokens_tail"]


def test_sixteen_requests_at_once_play_what_was_published(world):
    world.origin.wait_for_assets(16)
    texts, counted, took_s = world.run()
    print(
        f"16 hits: {took_s:.1f} s, of {world.cold_s:.1f} s to compute all; longest wait for a first token "
        f"{max(world.engine.first_tokens_s):.1f} s; {counted}"
    )
    assert texts == world.cold
    assert counted["lookups_hit"] == 16
    assert counted["plays"] == 16
    # Whole blocks, and one token at least is left for vLLM to compute.
    tokens = sum((len(prompt) - 1) // 128 * 128 for prompt in world.prompts)
    # What the first of a family has brought is in vLLM's own cache when the others are promised anything.
    assert counted["tokens_loaded"] == tokens - 12 * 384
    assert "tokens_missed" not in counted
    assert "plays_unused" not in counted
    world.engine.settle()  # what was published already is not published again
    assert counted.get("publish_dropped_known", 0) + world.engine.counted().get("publish_dropped_known", 0) == 16


def test_after_a_reset_of_its_caches_nothing_from_before_is_played(world, monkeypatch):
    """vLLM notifies the connector that its weights may have changed: here they have not, so the text is the same."""
    monkeypatch.setattr(world.engine.half, "_generation", Generation())  # the other tests go on with what was published
    prompt, cold = world.prompts[7], world.cold[7]
    world.origin.wait_for_assets(16)
    before = len(assets_of(world.assets))
    assert world.engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    texts, counted, _ = world.run([prompt])
    assert texts == [cold]
    assert counted["lookups_miss"] == 1
    assert "tokens_loaded" not in counted
    world.engine.settle()  # published under its new name
    assert len(assets_of(world.assets)) == before + 1
    world.origin.wait_for_assets(before + 1)
    texts, counted, _ = world.run([prompt])
    assert texts == [cold]
    assert counted["tokens_loaded"] == (len(prompt) - 1) // 128 * 128


@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_group_that_is_lost_is_computed_and_what_is_before_it_is_used(world, which):
    prompt, cold = world.prompts[5], world.cold[5]
    asset = world.asset_of(prompt)
    groups = asset.catalog.groups
    group = {"first": 0, "middle": groups // 2, "last": groups - 1}[which]
    with harmed(asset, group, "FP16", "corrupt"):
        texts, counted, took_s = world.run([prompt])
    assert texts == [cold]
    assert counted["plays_cut"] == 1
    assert counted.get("tokens_loaded", 0) == group * 128
    assert counted["tokens_missed"] == (groups - group) * 128
    assert counted["lookups_hit"] == 1  # asked about once: a request whose load failed is not loaded again
    assert took_s < world.cold_s  # and not for the deadline: there was nothing to wait for


def received(client):
    async def ask(client):
        return (await client.connect()).stats().bytes_received

    return client.begin(ask).result()


def test_an_origin_that_dies_mid_play(world):
    trace = constant(60.0)
    world.engine.forget()
    world.link.begin(trace, 0.0, Conditions(rtt_s=0.01))
    client = world.engine.client
    before = received(client)

    over = threading.Event()

    def kill():
        while received(client) < before + (24 << 20) and not over.wait(0.01):
            pass
        world.origin.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        texts, counted, took_s = world.run(kv_transfer_params={"deadline_s": 6.0})
    finally:
        over.set()
        killer.join()
        world.origin.start()
    print(
        f"origin dies: {took_s:.1f} s, of {world.cold_s:.1f} s to compute all; longest wait for a first token "
        f"{max(world.engine.first_tokens_s):.1f} s; {counted}"
    )
    assert texts == world.cold
    assert counted["tokens_loaded"] > 0  # what had come of the first is used
    assert counted["tokens_missed"] > 0
    assert took_s < 6.0 + world.cold_s + MORE_S


def test_and_is_played_from_again_once_it_is_back(world):
    end_s = time.monotonic() + 300
    while True:
        texts, counted, _ = world.run(world.prompts[:1])
        assert texts == world.cold[:1]
        if counted.get("tokens_loaded"):
            break
        assert time.monotonic() < end_s


def test_a_deadline_cuts_the_prefix_and_no_block_fails(world, monkeypatch):
    """On a link that carries a part of the cache, the received groups are used, and no block fails."""
    failed = set()
    before = world.engine.worker.failed_blocks

    def watched():
        blocks = before()
        failed.update(blocks)
        return blocks

    worker = world.engine.worker
    monkeypatch.setattr(worker, "failed_blocks", watched)
    for deadline_s in (4.0, 12.0, 36.0):  # a loaded machine may bring nothing by the first
        # Two and a half groups come by the deadline, and no more; computing one instead would take twice as long.
        link = Trace("ends", "ends", (0.0, deadline_s), (59.0 * BYTES_PER_MBIT / deadline_s, 1.0), 1000.0)
        world.link.begin(link, 0.0, Conditions(rtt_s=0.01))
        slow = worker._settings.model_copy(update={"prefill_rate": 160.0 / deadline_s})
        monkeypatch.setattr(worker, "_settings", slow)
        texts, counted, _ = world.run(world.prompts[:1], kv_transfer_params={"deadline_s": deadline_s})
        assert texts == world.cold[:1]
        assert counted["plays_cut"] == 1
        if counted.get("tokens_loaded"):
            break
    assert 0 < counted["tokens_loaded"] < 512
    assert counted["tokens_loaded"] + counted["tokens_missed"] == (len(world.prompts[0]) - 1) // 128 * 128
    assert not failed


def test_an_aborted_request_cancels_its_play(world):
    from vllm import SamplingParams

    world.engine.forget()
    world.engine.counted()
    free = world.engine.free_blocks()
    world.link.begin(constant(2.0), 0.0, Conditions(rtt_s=0.01))
    core = world.engine.llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": world.prompts[0]}, SamplingParams(max_tokens=4))
    end_s = time.monotonic() + 300
    while not world.engine.worker._plays:
        core.step()
        assert time.monotonic() < end_s
    (play,) = world.engine.worker._plays.values()
    core.abort_request(["gone"])
    world.engine.settle()
    assert play.handle.done()
    assert world.engine.free_blocks() == free
    assert world.engine.worker._plays == {}
    assert world.engine.counted()["plays_aborted"] == 1
    world.link.open(Conditions(rtt_s=0.01))
    texts, _, _ = world.run(world.prompts[:2])
    assert texts == world.cold[:2]


def test_memory_stays_flat_over_200_requests(world):
    import gc

    def resident():
        gc.collect()
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    prompts = [prompt[:400] for prompt in world.prompts]
    for prompt in prompts:
        world.engine.generate([prompt], tokens=1)
    rounds = []
    for _ in range(25):
        world.run(prompts[:8], tokens=1)
        rounds.append(resident())
    print("resident MiB after each 8 requests:", [round(mib) for mib in rounds])
    assert rounds[-1] - rounds[4] < 48
