"""Names of models: different texts and different facts have different names, and what is usual adds nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvabr.types.kv import KVSpec
from kvabr.types.naming import LOOSE, TrackNamespace, akin, safe_name, with_facts

PLAIN = st.from_regex(r"[A-Za-z0-9._-]{1,20}(/[A-Za-z0-9._-]{1,20})?", fullmatch=True)
RAW = st.one_of(st.text(max_size=300), PLAIN, st.text("aA-:@/ .", max_size=8))
FACTS = st.dictionaries(
    st.sampled_from("abc"), st.none() | st.text(max_size=3) | st.lists(st.integers(0, 2), max_size=2)
)


def usual(facts):
    return {key: value for key, value in facts.items() if value not in (None, "", [])}


@given(RAW, RAW)
def test_different_texts_have_different_names(one, other):
    assert (safe_name(one) == safe_name(other)) == (one == other)
    assert (safe_name(one, LOOSE) == safe_name(other, LOOSE)) == (one == other)


@given(RAW)
def test_every_name_names_a_namespace_in_both_forms(raw):
    name = with_facts(safe_name(raw), {"rank": 1})
    space = TrackNamespace(name, "0" * 64)
    assert TrackNamespace.from_fields(space.split_fields()) == space
    longest = f"{name}+layers1000-2000+heads1000-1001,1002-1003"
    KVSpec.uniform(longest, "t", 1, 1, 8, "float16")


@given(PLAIN)
def test_a_plain_name_is_its_own(raw):
    assert safe_name(raw) == raw == with_facts(raw, {"adapter": None, "overrides": {}, "ranks": []})


@given(PLAIN, FACTS, PLAIN, FACTS)
def test_facts_tell_names_apart(name, facts, other, others):
    same = name == other and usual(facts) == usual(others)
    assert (with_facts(name, facts) == with_facts(other, others)) == same


def test_models_that_were_tuned_further_are_akin():
    model, tuned = "llama-0123456789abcdef", with_facts("llama-0123456789abcdef", {"adapter": "x"})
    assert akin(model, tuned)
    assert akin(model, "llama-fedcba9876543210")
    assert not akin(model, "gemma-0123456789abcdef")
