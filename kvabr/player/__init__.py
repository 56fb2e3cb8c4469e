"""The player: a sans-I/O state machine that turns a catalog, a goal, a deadline and a policy into one KV cache.

It has no sockets, clock or threads: it takes events with ``now`` (seconds since the play began) and returns actions.
The simulator and the network driver run the same `Session`. Only `kvabr.player.assembler` needs torch.
"""
