"""Programs that run inside boxes: standard library only, sent as text, never trusted with anything."""
