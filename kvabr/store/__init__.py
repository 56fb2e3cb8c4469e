"""Where encoded groups and assets are kept: folders, memory, index, quota and eviction."""
