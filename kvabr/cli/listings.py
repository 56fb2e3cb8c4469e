"""`kvabr policies`, `estimators`, `selectors` and `engines`: list plug-ins."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvabr.cli.fields import command
from kvabr.types.fields import Shown

if TYPE_CHECKING:
    from kvabr.engines.adapters import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesCommand:
    """List the ABR policies that --policy can name.

    A policy of your own is a class in a file, no installation needed:

      from kvabr.abr import Decision, Policy, View

      class Cautious(Policy):
          def decide(self, view: View) -> Decision:
              group = view.first_missing()
              if group is None:
                  return Decision.finish("every group is in place or under way")
              share = 0.8 * view.budget_bytes(view.lower_bound) / len(view.missing)
              return Decision.fetch(group, view.best_track(group, share), f"{share:.0f} bytes a group")

      kvabr replay traces --policy ./cautious.py:Cautious anytime

    An installed package adds policies by the entry point group kvabr.policies.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorsCommand:
    """List the bandwidth estimators that --estimator can name. FILE.py:CLASS names one of your own.

    An estimator of your own is a class in a file, no installation needed:

      from collections import deque
      from statistics import median
      from kvabr.abr import Estimator

      class Median(Estimator):
          def __init__(self):
              super().__init__()
              self._rates = deque(maxlen=9)
          def sample(self, nbytes, seconds, now):
              if self.sound(nbytes, seconds, now):
                  self._rates.append(nbytes / seconds)
          def rate(self):
              return median(self._rates) if self._rates else 0.0
          def lower_bound(self):
              return 0.8 * self.rate()

      kvabr replay traces --estimator ./median.py:Median

    A sample: nbytes arrived within seconds of a busy link, ending at now (s). Rates are in bytes per second, 0.0 until
    the first sample; policies spend the lower bound. An installed package adds estimators by the entry point group
    kvabr.estimators.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorsCommand:
    """List the selectors, which choose the tokens of joined passages that are recomputed.

    FILE.py:CLASS names one of your own, which derives from kvabr.blend.Selector.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesCommand:
    """List the serving engines that play through kvabr: versions installed and tested, and features.

    mode: with "hole", a missed group is computed where it is missing; with "suffix", the engine computes everything
    after the first miss, so the player protects the front. upgrades: a cache in use can be improved. passages: prompts
    made of passages are played, with the tokens that matter recomputed.

    An installed package can add an engine: a kvabr.engines.adapters.Adapter in the entry point group kvabr.engines.
    """

    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """Write the list as JSON."""


def _policies(_args: PoliciesCommand) -> int:
    from kvabr.abr.plugins import policies
    from kvabr.abr.policies import DEFAULT

    spelled = {"fixed": "fixed:TRACK", "cake": "cake[:TRACK]"}
    rows = []
    for name, cls in sorted(policies().items()):
        shown = spelled.get(name, name) + (" (default)" if name == DEFAULT else "")
        rows.append((shown, cls.estimator, _yes(cls.abandons), _first_line(cls), cls.__module__))
    _print("ABR policies", ("name", "estimator", "abandons", "what it does", "from"), rows, ("from", "estimator"))
    return 0


add_policies = command(PoliciesCommand, _policies)


def _estimators(_args: EstimatorsCommand) -> int:
    from kvabr.abr.plugins import estimators

    rows = [(name, _first_line(cls), cls.__module__) for name, cls in sorted(estimators().items())]
    _print("bandwidth estimators", ("name", "what it does", "from"), rows, ("from",))
    return 0


add_estimators = command(EstimatorsCommand, _estimators)


def _selectors(_args: SelectorsCommand) -> int:
    from kvabr.blend.selectors import selectors
    from kvabr.player.play_choices import DEFAULT_SELECTOR

    rows = [
        (
            name + (" (default)" if name == DEFAULT_SELECTOR else ""),
            ", ".join(sorted(cls.needs)) or "-",
            _first_line(cls),
        )
        for name, cls in sorted(selectors().items())
    ]
    _print("selectors", ("name", "needs", "what it chooses"), rows, ("needs",))
    return 0


add_selectors = command(SelectorsCommand, _selectors)


def _engines(args: EnginesCommand) -> int:
    from kvabr.cli.display import write_json
    from kvabr.engines.adapters import adapters

    found = [adapter for _, adapter in sorted(adapters().items())]
    rows = [
        (one.name, _installed(one), one.range, one.mode, _yes(one.upgrades), _yes(one.publishes), one.passages)
        for one in found
    ]
    columns = ("name", "installed", "tested", "mode", "upgrades", "publishes", "passages")
    _print("serving engines", columns, rows, ("publishes", "upgrades"))
    values = []
    for one in found:
        version = one.installed
        known = version is not None and one.is_tested(version)
        values.append(asdict(one) | {"installed": version, "known": known})
    write_json(args.json, values)
    return 0


add_engines = command(EnginesCommand, _engines)


def _print(title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]], spare: Sequence[str]) -> None:
    from kvabr.cli.display import output, table

    whole = ("name", "from")  # never broken
    output().print(table(title, columns, rows, left=whole, fold=set(columns).difference(whole), spare=spare))


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _installed(adapter: Adapter) -> str:
    version = adapter.installed
    if version is None:
        return "no"
    return version if adapter.is_tested(version) else f"{version} (not tested)"
