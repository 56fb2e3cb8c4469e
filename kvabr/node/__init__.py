"""What a node does beside playing: `serving` hands on to its neighbours what it has fetched. Above client and server."""
