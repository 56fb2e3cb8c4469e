"""A player process: network, policies and checks for all engines of a node, outside the models' processes.

An engine sends requests through a Unix socket (`client`), receives compressed groups in shared memory, and expands
these in place. The first engine starts the process (`process`, ``kvabr player``). The process ends some time after the
last engine. If it crashes, its plays fail, and the next call starts a new process.

Both ends belong to one user, so pickled messages (`channel`) add no risk: that user may debug either process anyway.
"""
