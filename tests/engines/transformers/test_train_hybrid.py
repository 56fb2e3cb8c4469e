"""`tools/train-hybrid` trains, stops, goes on where it stopped, and writes a model that transformers loads."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from tests.scripts import run_tool


def train(work, steps):
    options = ["--steps", str(steps), "--batch", "1", "--length", "64", "--threads", "1"]
    from transformers.models.kimi_linear import modeling_kimi_linear as model

    # It replaces a function, and compares its own with what it finds there.
    with mock.patch.object(model, "chunk_kimi_delta_attention", model.chunk_kimi_delta_attention):
        done = run_tool("train-hybrid", work, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_goes_on_where_it_stopped(tmp_path):
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    assert "step 0 of 1" in train(tmp_path, 1)
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert "step 1 of 2" in train(tmp_path, 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "training.json").read_text())["steps"] == 2
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:  # loaded, some may be float32
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118  # no mapping
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) <= 8_000_000
    assert not torch.equal(first.lm_head.weight, model.lm_head.weight)
    assert set(model.config.layer_types) == {"linear_attention", "full_attention"}
