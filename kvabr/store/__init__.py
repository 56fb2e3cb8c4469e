"""Stores of encoded groups and assets: folders, buckets and memory, with an index and quotas."""
