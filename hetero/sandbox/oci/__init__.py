"""Container images on disk (OCI layouts and archives, `docker save`), unpacked without trusting them."""
