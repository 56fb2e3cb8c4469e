"""A player process: network, policies and checks of all engines of a node, apart from the models' processes.

An engine sends requests through a Unix socket (`client`), receives compressed groups in shared memory, and expands them
in place. The first engine starts the process (`process`, ``kvabr player``), which ends some time after the last. If it
dies, its plays fail, and the next call starts another.

Both ends belong to one user, so messages are pickled (`channel`): a peer may also debug the other process.
"""
