"""A day of requests over two sites: prefill queues, prefix caches, and a link that requests share."""
