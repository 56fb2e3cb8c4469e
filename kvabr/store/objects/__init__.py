"""Object stores: S3, Google Cloud Storage, Azure, folders of objects, and HTTP caches in front of them."""
