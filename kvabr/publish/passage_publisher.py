"""Publishes passages with an application's model, in a few prefills each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from kvabr.publish.fusion import FusionLosses
from kvabr.publish.model import TextModel, opened
from kvabr.publish.passages import CONTEXTS, contexts_for, free_cache, mean_cache
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot
from kvabr.publish.texts import calibration_texts
from kvabr.types.errors import UsageError
from kvabr.types.passage import Passage, PassageNotes, check_movable


def publish_passage(
    publisher: Publisher,
    model: TextModel,
    tokens: Sequence[int],
    *,
    contexts: int = CONTEXTS,
    fusion: FusionLosses | None = None,
    salt: bytes = b"",
) -> Future[PublishOutcome]:
    """Publish a passage: compute its cache now, after several context texts, and encode it in the background.

    Args:
        publisher: publishes this model's caches, see `kvabr.engines.transformers.cache_publisher`.
        model: see `kvabr.engines.transformers.model_loader.load_model`.
        tokens: ids of the passage, without special tokens at the start.
        contexts: number of texts to average over; 0: compute the passage alone.
        fusion: the model's loss from joining passages (`kvabr calibrate --blend`). Without it, only players that accept
            any loss use the passage; others compute it.
        salt: a tenant's secret, see `kvabr.types.naming.chain`.

    Returns:
        The outcome: ``published``, ``known`` (published before), ``full`` (queue full) or ``failed``.

    Raises:
        FormatError: the model cannot have passages.
        ForeignError: the losses are for another model.
        UsageError: invalid tokens, a passage too long for the model, or losses for another base.
    """
    engine, ids = model.engine, Passage(tuple(tokens)).ids
    check_movable(engine.spec)
    base = "mean" if contexts else "alone"
    notes = PassageNotes(base, contexts) if fusion is None else fusion.notes(engine.spec, base, contexts)
    before = contexts_for(model, calibration_texts(), contexts) if contexts else [list(opened(model, ()))]
    if (longest := max(map(len, before)) + len(ids)) > engine.context:
        raise UsageError(
            f"passage too long: {longest} tokens with the text before it, but the context of {engine.spec.model} is "
            f"{engine.context}"
        )
    done: Future[PublishOutcome] = Future()
    slot = publisher.reserve_passage(ids, notes, salt)
    if not isinstance(slot, Slot):
        done.set_result(PublishOutcome(slot))
        return done
    try:
        kv = mean_cache(engine, ids, before) if contexts else free_cache(engine, ids, before[0])
    except BaseException:
        slot.leave()
        raise
    slot.fill(kv, done.set_result)
    return done
