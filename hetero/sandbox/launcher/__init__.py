"""The launcher: one small process, standard library only, that makes every sandbox of its owner.

It imports neither `hetero` itself nor anything large: what it has in memory, every idle sandbox has, too.
"""
