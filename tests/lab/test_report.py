import io
import re

import pytest
from rich.console import Console

from kvabr_lab.matrix import EngineSpec
from kvabr_lab.report import write_report
from kvabr_lab.results_folder import PlayStore
from kvabr_lab.run import run
from kvabr_lab.tables import apart_table, causes_tables, cut_tables, deadline_table, ranking_table, verdict
from kvabr_lab.totals import cuts, result
from tests.lab.matrices import matrix, traces
from tests.replay.report_samples import HOSTILE
from tests.replay.test_report_page import embedded, embedded_source

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page of two loads, two round trips and two engines; and what it was made of."""
    folder = tmp_path_factory.mktemp("report")
    what = matrix(rtts=(0.01, 0.08), engines=(EngineSpec.parse("none"), EngineSpec.parse("2x")), loads=(0.05, 0.4))
    with PlayStore(folder) as store:
        played = run(what, store, jobs=1)
    totals = result(what, played)
    path = folder / "report.html"
    write_report(path, what, played, totals, per_policy=2)
    return path, what, played, totals


def test_the_page_holds_everything_and_loads_nothing(shown):
    path, what, played, totals = shown
    text = path.read_text(encoding="utf-8")
    markup = text.replace(embedded_source(text), "")
    assert not re.search(r"""(?:src|action|poster)\s*=|url\((?!#)|@import|\bfetch\(|XMLHttpRequest""", markup)
    assert "default-src 'none'" in text
    assert "{{" not in markup
    for policy in what.policies:
        assert f'<th scope="row">{policy}</th>' in markup
    for title in ("Ranking", "Which policy beats which", "By trace family", "By load", "By round trip", "By engine",
                  "Where regret comes from", "How regret is spread", "The worst plays"):  # fmt: skip
        assert f">{title}</h2>" in markup
    assert "By deadline" not in markup  # there is but one
    assert "mean regret against the network alone" in markup
    assert totals["summary"]["mpc"]["hit_ratio_ci95"]
    data = embedded(text)
    assert {policy["name"] for policy in data["policies"]} == set(what.policies)
    assert not re.search(r">1 [a-z]+s<", markup)
    assert data["facts"]["runs"] == what.plays
    # Every worst play is there, with its timeline, and is the very play that the table speaks of.
    links = [int(number) for number in re.findall(r'href="#play=(\d+)"', markup)]
    assert len(links) == 2 * len(what.policies)
    regrets = {policy: [] for policy in what.policies}
    for line in (line for lines in played.lines for line in lines):
        if line["feasible"]:
            regrets[line["policy"]].append(line["regret"])
    for number in links:
        play = data["plays"][number]
        assert play["requests"]
        assert play["decisions"]
    for policy in what.policies:
        worst = max(data["plays"][number]["regret"] for number in links if data["plays"][number]["policy"] == policy)
        assert worst == pytest.approx(max(regrets[policy]), rel=1e-4)
    # The best policy's play of the same moment is there to compare with.
    best = totals["comparison"]["ranking"][0]["policy"]
    for number in links:
        play = data["plays"][number]
        here = (play["trace"], play["start_s"])
        assert best in [other["policy"] for other in data["plays"] if (other["trace"], other["start_s"]) == here]


def test_hostile_names_stay_text(tmp_path):
    from dataclasses import replace

    odd = tuple(replace(trace, family=HOSTILE, name=f"{HOSTILE}/{number}") for number, trace in enumerate(traces()[:2]))
    what = matrix(traces=(*odd, *traces()[2:]), loads=(0.3,), policies=("cheapfirst", "mpc"))
    with PlayStore(tmp_path) as store:
        played = run(what, store, jobs=1)
    write_report(tmp_path / "page.html", what, played, result(what, played))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert "<!--" not in text
    assert "&lt;/script&gt;" in text


def test_a_matrix_in_which_nothing_is_feasible_has_a_page_that_says_so(tmp_path):
    what = matrix(loads=(0.001,), policies=("cheapfirst", "mpc"))
    with PlayStore(tmp_path) as store:
        played = run(what, store, jobs=1)
    totals = result(what, played)
    write_report(tmp_path / "page.html", what, played, totals)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "policies cannot be compared" in verdict(totals)
    assert "Infeasible plays" in text
    for table in (ranking_table, deadline_table, apart_table):
        table(totals)
    assert causes_tables(totals, 80) == []


def test_tables_and_verdict_say_who_leads(shown):
    _, what, played, totals = shown
    best, *others = totals["comparison"]["ranking"]
    assert verdict(totals).startswith(f"{best['policy']} leads")
    assert ranking_table(totals).row_count == len(what.policies)
    assert {table.row_count for table in causes_tables(totals, 60)} == {len(what.policies)}
    policies = [row["policy"] for row in totals["comparison"]["ranking"]]
    for cut in cuts(played, policies):
        for width in (80, 34):
            tables = cut_tables(cut, policies, width)
            assert sum(len(table.columns) - 1 for table in tables) == len(cut.values)
            for table in tables:
                assert table.row_count == len(policies)
                console = Console(width=width, record=True, file=io.StringIO())
                console.print(table)
                lines = console.export_text().splitlines()
                assert max(map(len, lines)) <= width
                names = {line.strip().partition(" ")[0] for line in lines}
                assert names >= set(policies), "a name goes on in the next line though there is room"
    assert others


def test_who_is_told_the_future_does_not_lead(tmp_path):
    what = matrix(loads=(0.2,), policies=("cachegen-oracle", "fixed:AC-5x", "fixed:FP16"))
    with PlayStore(tmp_path) as store:
        totals = result(what, run(what, store, jobs=1))
    assert totals["comparison"]["ranking"][0]["policy"] == "cachegen-oracle"
    assert re.match(r"fixed:AC-5x leads.*\(cachegen-oracle, which knows the future, has [.\d]+\)", verdict(totals))
