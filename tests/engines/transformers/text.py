"""Prompts for the tests' tiny model, and its answers."""

import random

import torch

_dice = random.Random(7)
IDS = [_dice.randrange(256) for _ in range(430)]
PREFIX = IDS[:400]


def cold(model, ids, cache=None, count=8):
    """The result of greedy ``generate()``, with the logits of every step."""
    given = torch.tensor([ids])
    return model.generate(
        given,
        attention_mask=torch.ones_like(given),
        past_key_values=cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def furthest(one, other):
    """Largest difference of two answers' logits; the answers must be the same."""
    assert torch.equal(one.sequences, other.sequences)
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True))
