"""Publishes passages with an application's own model, a few prefills each."""

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
    """Publish a passage. Its cache is computed at once, behind several texts; encoding goes on in the background.

    Args:
        publisher: of this model's caches, as `kvabr.engines.transformers.cache_publisher` makes it.
        model: the model and its tokenizer, as `kvabr.engines.transformers.model_loader.load_model` returns them.
        tokens: ids of the passage, as they will stand in prompts: without the special tokens that begin these.
        contexts: texts whose mean it is, see `contexts_for`; 0: it is computed alone.
        fusion: what joining passages costs the model, of the same number of contexts (`kvabr calibrate --blend`). None:
            it is not known, and a player computes the passage, unless it accepts any loss.
        salt: a tenant's secret, see `kvabr.types.naming.chain`.

    Returns:
        The outcome: ``published``, ``known`` (published before), ``full`` (too many wait) or ``failed``.

    Raises:
        FormatError: the model can have no passages.
        ForeignError: the losses are of another model.
        UsageError: these are no tokens of a passage, it does not fit the model's context, or the losses are of passages
            that were computed in another way.
    """
    engine, ids = model.engine, Passage(tuple(tokens)).ids
    check_movable(engine.spec)
    base = "mean" if contexts else "alone"
    notes = PassageNotes(base, contexts) if fusion is None else fusion.notes(engine.spec, base, contexts)
    before = contexts_for(model, calibration_texts(), contexts) if contexts else [list(opened(model, ()))]
    if (longest := max(map(len, before)) + len(ids)) > engine.context:
        raise UsageError(
            f"with a text before it the passage has {longest} tokens, and {engine.spec.model} sees {engine.context}"
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
