"""The real engine, in this process, with kvabr's connector; and prompts of a real text for it."""

import gc
import os
import time
from pydoc_data.topics import topics

import pytest
import torch

from kvabr.engines.vllm.config import VllmSettings

TEXT = "\n".join(topics.values())[:40_000]
"""Python's own help, which every Python has."""

ENVIRONMENT = {
    # Scheduler and worker in this process, so that a test can look at them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


NEEDS_FP8 = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has no FP8 cache on processors without AVX-512 and AMX",
)


def transfer_of(extra, role="kv_both", **more):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="KvabrConnector",
        kv_connector_module_path="kvabr.engines.vllm",
        kv_role=role,
        **({"kv_load_failure_policy": "recompute"} | more),
        kv_connector_extra_config=extra,
    )


def all_of(connector):
    return getattr(connector, "_connectors", [connector])


class RealEngine:
    def __init__(self, model, extra, role="kv_both", transfer=None, **more):
        os.environ.update(ENVIRONMENT)
        from vllm import LLM

        VllmSettings.tail = 0  # what is cached is played to its end, but where a test says otherwise
        options = {"dtype": "float32", "max_model_len": 2304, "max_num_seqs": 32, "enforce_eager": True} | more
        self.llm = LLM(
            str(model),
            disable_log_stats=False,
            kv_transfer_config=transfer or (None if extra is None else transfer_of(extra, role)),
            **options,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        if extra is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

            # With several ranks they have processes of their own.
            own = all_of(get_kv_transfer_group()) if has_kv_transfer_group() else []
            self.worker = next((each._worker for each in own if hasattr(each, "_worker")), None)
            # vLLM's MultiConnector has others beside kvabr's.
            own = [each for each in all_of(self.scheduler.connector) if hasattr(each, "_scheduler")]
            self.half, self.client = own[0]._scheduler, own[0]._client

    def close(self):
        """End the engine, so that another one can be started in this process."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.settle()
        self.core.shutdown()
        ensure_kv_transfer_shutdown()
        # What is destroyed later takes the next engine's process groups with it.
        del self.llm, self.core
        gc.collect()

    def tokens(self, text):
        return self.llm.get_tokenizer().encode(text)

    def generate(self, prompts, tokens=8, salt=None, lora=None, media=None, **params):
        """Texts of prompts that are there all at once, with a salt in vLLM's own prefix cache if one is given.

        ``media``: of each prompt, as vLLM takes them.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=params or None)
        own = ({} if salt is None else {"cache_salt": salt}) | (media or {})
        out = self.llm.generate(
            [{"prompt_token_ids": p} | own for p in prompts], sampling, use_tqdm=False, lora_request=lora
        )
        self.first_tokens_s = [one.metrics.first_token_latency for one in out]
        self.served = [(one.kv_transfer_params or {}).get("kvabr") for one in out]
        return [one.outputs[0].token_ids for one in out]

    def settle(self, within_s=60.0):
        """Step until vLLM has cleaned up, and publications are on disk."""
        end_s = time.monotonic() + within_s
        while self.scheduler.has_finished_requests() or self.scheduler.has_requests():
            self.llm.llm_engine.step()
            assert time.monotonic() < end_s
        if self.worker is not None and self.worker._publications is not None:
            while self.worker._publications._publishers.ended._known:
                time.sleep(0.005)
                assert time.monotonic() < end_s

    def forget(self):
        self.settle()
        assert self.llm.reset_prefix_cache()

    def finds(self, prompt):
        """Whether the origin has something of a prompt, complete or growing."""
        spec = self.half._model.spec
        return self.client.begin(lambda client: client.find(prompt, model=spec, any_dtype=True)).result() is not None

    def counted(self):
        """The counts since the last call, from vLLM's own metrics instead of the connector."""
        now = {
            metric.name.removeprefix("vllm:kvabr_"): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvabr_") and hasattr(metric, "value")
        }
        before, self._before = getattr(self, "_before", {}), now
        return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}

    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def prompts_of(tokens, families=4, each=4, shared=384, most=700):
    """Prompts in families that share a prefix; each goes on with another part of the text, and has another length."""
    assert len(tokens) >= families * shared + 97 * families * each + most
    out = []
    for family in range(families):
        prefix = tokens[family * shared : (family + 1) * shared]
        for member in range(each):
            begin = families * shared + 97 * (family * each + member)
            length = 140 + (most - shared - 140) * (family * each + member) // (families * each)
            out.append(prefix + tokens[begin : begin + length])
    return out
