"""The publisher's side: encode a real cache, measure what each level costs, keep it in a folder.

The folder's `catalog.json` is all that a player needs to decide; groups and profile are fetched; `prompt.json` stays
with the publisher.
"""
