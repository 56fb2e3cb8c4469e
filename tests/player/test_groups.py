"""The stages of groups: what follows what in plays that go wrong in every way, and in the docs."""

import random
from pathlib import Path

from kvabr.player.groups import TRANSITIONS, Groups, Stage
from tests.player.random_play import world

DOCS = Path(__file__).parents[2] / "docs/design/architecture.md"


def test_groups_go_only_where_the_table_says_and_everywhere_it_says(monkeypatch):
    seen, found = set(), Groups._found

    def watched(groups, group):
        stage = found(groups, group)
        seen.add((groups.stage(group), stage))
        return stage

    monkeypatch.setattr(Groups, "_found", watched)
    for seed in (*range(500), 832):  # with a group that comes while it is computed, and has been abandoned
        world(random.Random(seed), "anytime" if seed % 2 else "cachegen").run()
    changes = {(before, after) for before, after in seen if before != after}
    told = {(before, after) for before, afters in TRANSITIONS.items() for after in afters}
    assert changes <= told
    # These plays are of complete assets.
    assert all(Stage.UNPUBLISHED in change for change in told - changes)


def test_the_docs_have_the_table():
    rows = [
        f"| {stage.name.lower()} | {', '.join(after.name.lower() for after in TRANSITIONS[stage]) or 'stays'} |"
        for stage in Stage
    ]
    assert "\n".join(rows) in DOCS.read_text(encoding="utf-8")
