"""The client: finds a prompt's cache at an origin, plays it over a real connection, hands over one tensor.

This room joins the others: it dials (`connect`, `redial`), asks what is cached (`lookup`, `profiles`), and drives the
player's state machine with an event loop, threads and a clock (`driver`, `play`). It decides nothing that a policy
could decide, and knows no wire format.
"""
