"""Requests with LoRA adapters: an adapter's content alone decides whether they share caches."""

import json
import shutil
import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from kvabr.engines.transformers.adapter_digest import CONFIG, WEIGHTS, folder_digest
from kvabr.engines.vllm import loras
from kvabr.engines.vllm.config import lora_facts
from kvabr.store.locations import open_asset
from kvabr.types.naming import with_facts
from tests.client.served import Served
from tests.engines.vllm.halves import Bench, lora, request
from tests.toymodel import SPEC


def adapter(folder, seed, alpha=8):
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": alpha}))
    torch.manual_seed(seed)
    stem = "base_model.model.model.layers.0.self_attn.v_proj"
    save_file(
        {f"{stem}.lora_A.weight": torch.randn(2, 8), f"{stem}.lora_B.weight": torch.randn(8, 2)}, folder / WEIGHTS
    )
    return folder


@pytest.fixture
def empty(tmp_path):
    """An origin that serves what a bench publishes, and adapters: one, the same with another name, and two others."""
    (tmp_path / "assets").mkdir()
    for name, *about in (("one", 1), ("other", 2), ("scaled", 1, 9)):
        adapter(tmp_path / name, *about)
    shutil.copytree(tmp_path / "one", tmp_path / "renamed")
    served = Served(tmp_path / "assets", tmp_path)
    yield served, tmp_path
    served.close()


@pytest.mark.parametrize("live", [False, True])
def test_adapters_and_their_base_do_not_mix(empty, live):
    served, folder = empty
    with closing(Bench(served, folder / "assets", publish_live=live)) as bench:
        mine = request("mine", lora_request=lora(folder / "one"))
        bench.prefilled()
        assert bench.matched(mine) == (0, False)
        if live:
            mine.num_computed_tokens, bench.running, bench.tables = 0, {"mine": 70}, {"mine": [list(range(9))]}
            bench.step()
            mine.num_computed_tokens, bench.running = 70, {}
        assert bench.scheduler.finished(mine, [list(range(9))])
        bench.steps()
        bench.published()
        name = with_facts(SPEC.model, {"adapters": folder_digest(folder / "one")})
        assert open_asset(folder / "assets").catalog.spec.model == name
    with closing(Served(folder / "assets", folder)) as again, closing(Bench(again)) as bench:
        for who, tokens in [
            (lora(folder / "renamed", "another"), 64),
            (lora(folder / "other", "adapter"), 0),
            (lora(folder / "scaled", "adapter"), 0),
            (None, 0),
        ]:
            asked = request(f"for {who}", lora_request=who)
            assert bench.load(asked)[0] == tokens


@pytest.mark.parametrize(
    ("change", "more", "why"),
    [
        ("gone", {}, "adapter_config.json: cannot be read"),
        ("nowhere", {"lora_path": "~nobody/\0"}, "cannot be read"),
        ("in place", {"load_inplace": True}, "its weights may change under its name"),
        ("changed", {}, "has changed since vLLM first loaded it; load changed weights from another folder"),
    ],
)
def test_an_adapter_without_a_digest_is_neither_played_nor_published(empty, change, more, why):
    served, folder = empty
    bench = Bench(served, folder / "assets")
    told = []
    bench.scheduler._trouble.warn = lambda what, why: told.append(f"{what}: {why}")
    try:
        if change == "gone":
            (folder / "one" / CONFIG).unlink()
        elif change == "changed":
            bench.matched(request("first", lora_request=lora(folder / "one")))
            shutil.copy(folder / "other" / WEIGHTS, folder / "new")
            (folder / "new").replace(folder / "one" / WEIGHTS)
        asked = request(lora_request=lora(folder / "one", **more))
        assert bench.matched(asked) == (0, False)
        assert not bench.scheduler.finished(asked, [list(range(9))])
        counted = bench.scheduler.counts.take()
        assert (counted["lookups_unfit"], counted["publish_skipped_unfit"]) == (1, 1)
        assert why in told[-1]
    finally:
        bench.close()


def test_what_was_computed_while_an_adapter_changed_is_not_published(empty):
    served, folder = empty
    with closing(Bench(served, folder / "assets")) as bench:
        asked = request(lora_request=lora(folder / "one"))
        assert bench.matched(asked) == (0, False)
        shutil.copy(folder / "other" / WEIGHTS, folder / "new")
        (folder / "new").replace(folder / "one" / WEIGHTS)  # vLLM may read it only now
        assert not bench.scheduler.finished(asked, [list(range(9))])
        assert bench.scheduler.counts.take()["publish_skipped_unfit"] == 1


def test_what_vllm_leaves_out_of_adapters_is_in_the_name(empty):
    """``--lora-target-modules`` and ``--enable-tower-connector-lora`` change what the same files do."""
    served, _ = empty
    with closing(Bench(served)) as bench:
        plain = SimpleNamespace(target_modules=None, enable_tower_connector_lora=False, max_lora_rank=64)
        configs = [None, plain]
        configs += [SimpleNamespace(**vars(plain) | {"target_modules": modules}) for modules in (["q"], ["q", "v"])]
        configs.append(SimpleNamespace(**vars(plain) | {"enable_tower_connector_lora": True}))
        models = [replace(bench.model, lora=lora_facts(SimpleNamespace(lora_config=each))) for each in configs]
        first, same, *others = (model.adapted("ab" * 32).spec.model for model in models)
        assert first == same == with_facts(SPEC.model, {"adapters": "ab" * 32})
        assert len({first, *others}) == 4
        assert {model.adapted(None).spec.model for model in models} == {SPEC.model}


def test_a_digest_that_is_done_between_two_looks_loses_no_lookup(empty):
    served, folder = empty
    with closing(Bench(served, folder / "assets")) as bench:
        answers = [True, False]
        bench.scheduler._waits = lambda _: answers.pop(0) if answers else False
        assert bench.matched(request()) == (0, False)
        assert bench.scheduler.counts.take() == {"lookups_miss": 1}


def test_a_request_waits_for_the_digest_of_its_adapter_until_its_deadline(empty, monkeypatch):
    """Reading an adapter takes as long as it takes; no step waits for it."""
    served, folder = empty
    go_on = threading.Event()
    monkeypatch.setattr(loras, "folder_digest", lambda path: go_on.wait(60) and folder_digest(path))
    now = 100.0
    bench = Bench(served, folder / "assets")
    adapters = bench.scheduler._adapters = loras.Adapters(10.0, lambda: now)
    try:
        asked = request(lora_request=lora(folder / "one"))
        bench.scheduler.arrived(asked)
        assert bench.scheduler.matched(asked, 0) == (None, False)
        assert bench.scheduler.step({}, {}.get).polling  # so that the worker does not hurry
        now += 10.0
        assert bench.scheduler.matched(asked, 0) == (0, False)
        assert bench.scheduler.counts.take() == {"lookups_unfit": 1}
        assert not bench.scheduler.step({}, {}.get).polling
        go_on.set()
        adapters._seen[str(folder / "one")].digest.result()
        assert bench.matched(request("later", lora_request=lora(folder / "one"))) == (0, False)
        assert bench.scheduler.counts.take() == {"lookups_miss": 1}
    finally:
        go_on.set()
        bench.close()
