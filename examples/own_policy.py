"""Write a policy, record a trace, and compare the policy with the default on it.

python examples/own_policy.py
"""

from kvabr.abr import Decision, Policy, View
from kvabr.data import default_catalog
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.trace import Trace


class EarliestFirst(Policy):
    """Fetch groups in prompt order, each on the best track that its share of the link carries."""

    def decide(self, view: View) -> Decision:
        """Return the next request, with a reason."""
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        share = 0.8 * view.budget_bytes(view.lower_bound) / len(view.missing)
        return Decision.fetch(group, view.best_track(group, share), f"{share:.0f} bytes a group")


def main() -> None:
    """Play both over one trace."""
    # Seconds and bytes per second: 40 Mbit/s with a gap of one second. `kvabr.replay.readers` reads recorded traces.
    trace = Trace("mine/tunnel", "mine", times=(0.0, 1.5, 2.5), rates=(5e6, 0.0, 5e6), duration_s=8.0, rtt_s=0.05)
    experiment = Experiment(default_catalog(), ReplayOptions(deadline_s=4.0))
    for policy in (f"{__file__}:EarliestFirst", "anytime"):
        run = experiment.play(trace, 0.0, policy).run
        name = policy.rpartition(":")[2]
        print(f"{name}: after {run['ttft_s']:.2f} s, loss {run['loss']:.4f}, regret {run['regret']:.4f}")


if __name__ == "__main__":  # the policy is loaded from this file
    main()
