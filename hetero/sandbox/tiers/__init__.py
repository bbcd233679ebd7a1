"""The tiers beside the default one: the same Sandbox, held in by other means.

`Sandbox.create(tier=...)` chooses; nothing is ever chosen because something else failed.
"""
