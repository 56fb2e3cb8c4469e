"""Where encoded groups and assets are kept: folders, memory, index and quota."""
