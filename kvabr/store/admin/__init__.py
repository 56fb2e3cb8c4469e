"""Store administration: listing, removal, checking and copying. Loaded by `kvabr store` alone.

`protocol` says what a kind of store must provide; folders and buckets provide it.
"""
