"""A player process: network, policies and checks of all engines of a node, out of the way of those that run models.

An engine's process asks through a Unix socket (`client`), and gets compressed groups in shared memory, which it expands
where they belong. The process (`process`, the command ``kvabr player``) is started by the first engine that needs one,
and ends some time after the last. If it dies, its plays fail, their requests are computed, and the next call starts
another.

Both ends must be processes of one user, on one host, with the same kvabr. That is why messages are pickled (`channel`):
who may connect may as well debug the other process.
"""
