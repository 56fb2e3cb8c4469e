"""What a node does beside playing: it serves on what it has fetched (`serving`). Above client and server."""
