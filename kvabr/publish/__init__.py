"""The publisher: encode a real cache, measure what each level costs, and write an asset."""
