"""Managing what a store holds: listing, pins, expiry, collection of garbage, checking and copying.

`rules` decides and does no I/O. `library` says what a kind of store must provide; folders and buckets provide it.
"""
