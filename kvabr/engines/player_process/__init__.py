"""A player process: network, policies and checks of all engines of a node, apart from the models' processes.

An engine's process sends requests through a Unix socket (`client`), and receives compressed groups in shared memory,
which it expands in place. The process (`process`, ``kvabr player``) is started by the first engine, and ends some time
after the last. If it dies, its plays fail, their requests are computed, and the next call starts another.

Both ends must be processes of one user, on one host, with the same kvabr. Messages are therefore pickled (`channel`): a
peer that may connect may also debug the other process.
"""
