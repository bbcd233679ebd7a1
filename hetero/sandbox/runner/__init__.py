"""The runner: one small process per command or file operation of a box that has no launcher of its own.

It serves the tiers whose boxes are a copied tree of files. Standard library only, like the launcher, whose
parts it shares.
"""
