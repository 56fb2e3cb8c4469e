"""What the encoder of frames tells codecs of a prompt's end."""

import pytest
import torch

from kvabr.publish.encoder import own_profile
from kvabr.publish.frames import FrameEncoder, MemoryFrames
from tests.kvdata import related, spec

SHAPE = spec(4, 2, 32, group_tokens=128)


@pytest.mark.parametrize("tokens", [1024, 1025, 1027])
def test_the_last_tokens_of_a_prompt_are_stored_finer_wherever_its_groups_end(tokens):
    kv = related(SHAPE, tokens, 3)
    frames = FrameEncoder(
        SHAPE,
        [f"{n:064x}" for n in range(-(-tokens // 128))],
        tokens,
        ["AC-L0"],
        own_profile(SHAPE, (kv,)),
        MemoryFrames(),
        finer_end=True,
    )
    frames.encode((kv,))
    out = torch.empty_like(kv)
    for unit in frames.units:
        frames.decode(unit.group, "AC-L0", out[:, :, :, unit.first : unit.first + unit.tokens])
    error = (out - kv).square().mean(dim=(0, 1, 2, 4)).sqrt()
    assert float(error[-4:].max()) < 0.02 * float(error.median())
