"""A day of requests over two sites, with prefill queues, prefix caches, and a link that requests share."""
