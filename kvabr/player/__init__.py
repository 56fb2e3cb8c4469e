"""The player: a sans-I/O state machine that turns a catalog, a goal, a deadline and a policy into one KV cache.

It has no sockets, clock or threads: it takes events with ``now`` (seconds since the play began) and returns actions.
The simulator and the network driver run the same `Session`, built by `new_session`. Only `kvabr.player.assembler`,
which holds the tensor, needs torch.
"""
