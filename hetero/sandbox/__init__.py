"""Sandboxes: isolated environments that snapshot, fork, pause and tell the truth about what ran in them."""
