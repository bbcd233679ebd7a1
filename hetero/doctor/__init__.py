"""Checks of the user's machine and model: what `hetero doctor` finds, and what to do about it."""
