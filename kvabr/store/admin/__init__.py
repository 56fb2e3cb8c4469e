"""Store administration: listing, pins, expiry, garbage collection, checking and copying. Loaded by `kvabr store` alone.

`rules` decides and does no I/O. `protocol` says what a kind of store must provide; folders and buckets provide it.
"""
