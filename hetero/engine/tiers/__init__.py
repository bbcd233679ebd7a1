"""Where blocks of the KV cache go when the pool has no room for them: RAM, then files.

A tier is a cache: what it does not give back is computed again, so nothing that goes wrong here changes a
result.
"""
