"""The publisher: encode a cache, measure the loss of each track, and write an asset."""
