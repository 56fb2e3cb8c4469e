"""The laboratory's sections of the page, as HTML: ranking, wins, axes, causes, distributions, worst plays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvabr.replay.report.queries import DASH
from kvabr.types.words import counted
from kvabr_lab.causes import CAUSES
from kvabr_lab.matrix import Cell, varying
from kvabr_lab.report import svg
from kvabr_lab.report.svg import escape
from kvabr_lab.report.worst import MAX_POLICIES, ShownPlay
from kvabr_lab.run import PlayedMatrix
from kvabr_lab.tables import cause_title, short
from kvabr_lab.totals import Cut, Score

_CAUSE_WORDS = {
    "too_high": "requested more than arrived in time",
    "too_low": "requested too little, or ended too early",
    "waited": "ended too late: not worth the time",
    "order": "the bytes in place could have bought a smaller loss",
    "idle": "requests were in flight but no data arrived: round trips",
    "wasted": "abandoned, failed and replaced transfers",
    "decode": "arrived, but not decoded in time",
    "compute": "groups that the engine could have recomputed",
    "gave_up": "plays without a cache at the end",
    "residual": "not explained by any rule",
}


def build(result: dict[str, Any], played: PlayedMatrix, found: Sequence[Cut], worst: Sequence[ShownPlay]) -> str:
    """Return all sections."""
    rows = result["comparison"]["ranking"]
    if not rows:
        return _section("ranking", "Ranking", "<p>No play was feasible for every policy.</p>") + _apart(result)
    policies = [row["policy"] for row in rows]
    regrets = {row["policy"]: (row["regret_mean"], *row["regret_ci95"]) for row in rows}
    parts = [
        _section("ranking", "Ranking", _ranking_note(result) + svg.ranking(rows, regrets)),
        _section("wins", "Which policy beats which", _wins(result["comparison"], policies)),
        *(_axis(cut, policies) for cut in found),
        _section("causes", "Where regret comes from", _causes(result, policies)),
        _section("spread", "How regret is spread", _distributions(played, policies)),
        _section("worst", "The worst plays", _worst(worst, list(played.cells), len(policies))),
        _apart(result),
    ]
    return "\n".join(parts)


def _section(name: str, title: str, inside: str) -> str:
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section aria-labelledby="{name}-title" class="lab" id="lab-{name}">{heading}{inside}</section>'


def _ranking_note(result: dict[str, Any]) -> str:
    comparison = result["comparison"]
    said = (
        f"Mean regret with its 95 % interval, over {comparison['plays']:,} feasible plays of {comparison['traces']} "
        "traces that every policy played. The bootstrap draws whole traces, with all of their plays."
    )
    places: dict[int, list[str]] = {}
    for row in comparison["ranking"]:
        places.setdefault(row["place"], []).append(row["policy"])
    shared = [names for names in places.values() if len(names) > 1]
    if shared:
        listed = "; ".join(", ".join(names) for names in shared)
        said += (
            f" In each of these groups the difference between the first and the others is not significant: {listed}."
        )
    return f'<p class="muted">{escape(said)}</p>'


def _wins(comparison: dict[str, Any], policies: Sequence[str]) -> str:
    pairs: dict[tuple[str, str], tuple[float, float, float, float, bool]] = {}
    for pair in comparison["pairs"]:
        low, high = pair["difference_ci95"]
        pairs[pair["first"], pair["second"]] = (pair["wins"], pair["difference"], low, high, pair["apart"])
        pairs[pair["second"], pair["first"]] = (pair["losses"], -pair["difference"], -high, -low, pair["apart"])
    head = "".join(f'<th scope="col" class="number">{escape(name)}</th>' for name in policies)
    body = []
    for row in policies:
        cells = []
        for column in policies:
            if row == column:
                cells.append('<td class="number self"></td>')
                continue
            wins, difference, low, high, apart = pairs[row, column]
            said = (
                f"{row} has less regret than {column} in {100 * wins:.1f} % of the plays; mean difference "
                f"{short(difference)} ({short(low)} to {short(high)}); "
                + ("significant" if apart else "not significant")
            )
            kind = ("win" if difference < 0 else "lose") if apart else "even"
            mark = "" if apart else " ≈"
            cells.append(f'<td class="number {kind}" title="{escape(said)}">{100 * wins:.0f} %{mark}</td>')
        body.append(f'<tr><th scope="row">{escape(row)}</th>{"".join(cells)}</tr>')
    note = (
        "Share of the plays in which the row has less regret than the column. Green: less regret in the mean; red: "
        "more; ≈: the difference is not significant over these plays, corrected for all pairs."
    )
    return f'<p class="muted">{note}</p>' + _table("<th></th>" + head, "".join(body), "families wins")


def _axis(cut: Cut, policies: Sequence[str]) -> str:
    compute = any(
        score.network_regret is not None and score.regret is not None and score.regret - score.network_regret > 1e-6
        for score in cut.scores.values()
    )
    inside = _grid("mean regret", cut, policies, _regret_cell)
    if compute:
        inside += _grid("mean regret against the network alone", cut, policies, _network_cell)
    inside += _grid("deadlines met<small>95 % interval below</small>", cut, policies, _hit_cell)
    return _section(f"by-{cut.title.replace(' ', '-')}", f"By {cut.title}", f'<div class="side">{inside}</div>')


_Cell = Callable[[Score, Sequence[Score]], str]


def _grid(title: str, cut: Cut, policies: Sequence[str], draw: _Cell) -> str:
    plays = {value: max((cut.scores[policy, value].plays for policy in policies), default=0) for value in cut.values}
    titles = {value: counted(plays[value], "play") for value in cut.values}
    head = "".join(
        f'<th scope="col" class="number">{escape(value)}<small>{titles[value]}</small></th>' for value in cut.values
    )
    columns = {value: [cut.scores[policy, value] for policy in policies] for value in cut.values}
    body = "".join(
        f'<tr><th scope="row">{escape(policy)}</th>'
        + "".join(draw(cut.scores[policy, value], columns[value]) for value in cut.values)
        + "</tr>"
        for policy in policies
    )
    return _table(f'<th scope="col">{title}</th>{head}', body)


def _regret_cell(score: Score, column: Sequence[Score]) -> str:
    return _shaded(score.regret, [other.regret for other in column])


def _network_cell(score: Score, column: Sequence[Score]) -> str:
    return _shaded(score.network_regret, [other.network_regret for other in column])


def _shaded(value: float | None, column: Sequence[float | None]) -> str:
    known = [other for other in column if other is not None]
    if value is None or not known:
        return f'<td class="number">{DASH}</td>'
    # Regret spans decades, so the shade follows its logarithm.
    least, most = math.log(min(known) + 1e-4), math.log(max(known) + 1e-4)
    depth = (math.log(value + 1e-4) - least) / (most - least) if most > least else 0.0
    strong = " strong" if value <= min(known) * 1.01 else ""
    return f'<td class="number{strong}" style="--shade:{100 * depth:.0f}%">{short(value)}</td>'


def _hit_cell(score: Score, column: Sequence[Score]) -> str:
    del column
    if score.hits is None:
        return f'<td class="number">{DASH}</td>'
    ends = f"{100 * score.low:.0f}{DASH}{100 * score.high:.0f}"
    shade = 100 * min(1.0, 2 * (1 - score.hits))
    inside = f'{100 * score.hits:.3g} %<small class="below">{ends}</small>'
    return f'<td class="number" style="--shade:{shade:.0f}%">{inside}</td>'


def _causes(result: dict[str, Any], policies: Sequence[str]) -> str:
    parted = {policy: result["summary"][policy]["causes"] for policy in policies}
    here = [cause for cause in CAUSES if any(abs(parted[policy][cause]) > 1e-7 for policy in policies)]
    legend = "".join(
        f'<span class="legend-item"><span class="swatch cause-{cause}"></span> {escape(cause_title(cause))} '
        f"<small>{escape(_CAUSE_WORDS[cause])}</small></span>"
        for cause in here
    )
    chart = svg.causes([(policy, parted[policy]) for policy in policies])
    head = "".join(f'<th scope="col" class="number">{escape(cause_title(cause))}</th>' for cause in here)
    body = "".join(
        f'<tr><th scope="row">{escape(policy)}</th><td class="number strong">'
        f"{short(result['summary'][policy]['regret_mean'])}</td>"
        + "".join(f'<td class="number">{short(parted[policy][cause])}</td>' for cause in here)
        + "</tr>"
        for policy in policies
    )
    table = _table(f'<th></th><th scope="col" class="number">mean regret</th>{head}', body)
    note = "Bars are shares of each policy's own regret; the number is its mean. The parts add up to it."
    return f'<p class="muted">{note}</p>{chart}<div class="legend">{legend}</div>{table}'


def _distributions(played: PlayedMatrix, policies: Sequence[str]) -> str:
    everything: dict[str, list[float]] = {}
    families: dict[str, dict[str, list[float]]] = {}
    for line in (line for lines in played.lines for line in lines):
        if line["feasible"]:
            everything.setdefault(line["policy"], []).append(line["regret"])
            families.setdefault(line["trace_family"], {}).setdefault(line["policy"], []).append(line["regret"])
    legend = "".join(
        f'<span class="legend-item"><svg width="22" height="8"><line class="curve {svg.line_class(index)}" x1="0" '
        f'x2="22" y1="4" y2="4"/></svg> {escape(policy)}</span>'
        for index, policy in enumerate(policies)
    )
    charts = _figure("all families", svg.distribution(everything, policies, "Regret over all families"))
    if len(families) > 1:
        charts += "".join(
            _figure(family, svg.distribution(values, policies, f"Regret over {family}"))
            for family, values in sorted(families.items())
        )
    note = "Percentage of plays with at most this regret; further left and up is better."
    return f'<p class="muted">{note}</p><div class="legend">{legend}</div><div class="charts-grid">{charts}</div>'


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def _worst(worst: Sequence[ShownPlay], cells: Sequence[Cell], policies: int) -> str:
    axes = varying(cells) if len(cells) > 1 else []
    rows = []
    for shown in worst:
        line = shown.line
        causes: Mapping[str, float] = line["causes"] or {}
        main = max(causes, key=lambda cause: causes[cause]) if causes else ""
        met = "met" if line["met"] else "gave up" if line["gave_up"] else "missed"
        rows.append(
            f'<tr><th scope="row">{escape(line["policy"])}</th>'
            f'<td><a href="#play={shown.play}" class="to-play">{escape(line["trace"])}</a></td>'
            f'<td class="number">{line["start_s"]:.2f} s</td><td>{escape(shown.cell.title(axes))}</td>'
            f'<td class="{"met" if line["met"] else "missed"}">{met}</td>'
            f'<td class="number strong">{short(line["regret"])}</td><td>{escape(cause_title(main))}</td></tr>'
        )
    names = ("policy", "trace", "start", "cell", "deadline", "regret", "mostly")
    head = "".join(f'<th scope="col"{_right(name)}>{name}</th>' for name in names)
    whose = "each policy" if policies <= MAX_POLICIES else f"the {MAX_POLICIES} best policies"
    note = (
        f"The plays with the most regret of {whose}; a click shows the timeline below. Above the timeline you can "
        "switch to the best policy's play of the same moment."
    )
    return f'<p class="muted">{note}</p>' + _table(head, "".join(rows))


def _right(name: str) -> str:
    return ' class="number"' if name in {"start", "regret"} else ""


def _apart(result: dict[str, Any]) -> str:
    lines = {policy: line["apart"] for policy, line in result["summary"].items()}
    if not any(line["plays"] for line in lines.values()):
        return ""
    rows = []
    for policy, line in lines.items():
        late, tokens = line["ttft_over_deadline_mean"], line["tokens_recomputed_mean"]
        numbers = (
            f"{line['plays']:,}", f"{line['gave_up']:,}", DASH if late is None else f"{late:.2f}",
            short(line["loss_mean"]), DASH if tokens is None else f"{tokens:.0f}",
        )  # fmt: skip
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        rows.append(f'<tr><th scope="row">{escape(policy)}</th>{cells}</tr>')
    names = ("plays", "gave up", "TTFT / deadline", "loss", "tokens recomputed")
    head = "".join(f'<th scope="col" class="number">{name}</th>' for name in names)
    note = "Not even the clairvoyant could have met the deadline: these plays are in none of the numbers above."
    table = _table(f"<th></th>{head}", "".join(rows))
    return _section("apart", "Infeasible plays", f'<p class="muted">{note}</p>{table}')


def _table(head: str, body: str, kind: str = "families") -> str:
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
