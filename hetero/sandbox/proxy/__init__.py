"""The proxy: a process outside of all boxes through which some of them reach some hosts.

It imports the standard library only and runs as the boxes' user; the owner decides and writes the journal.
"""
