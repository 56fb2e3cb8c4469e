"""The player: a sans-I/O state machine that turns a catalog, a goal, a deadline and a policy into one KV cache.

It has no sockets, clock or threads. Events go in with ``now`` (seconds since the play began), actions come out. The
simulator and the network driver run the same `Session`, built by `new_session`. `kvabr.player.assembler` holds the
tensor; only it needs torch.
"""
