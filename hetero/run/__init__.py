"""The pieces of a run around its loop: directory, journals, stopping, metrics, evaluation, memory plan."""
