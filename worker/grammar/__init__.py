"""Keeping an output inside a grammar: what is asked for, its compiler, and who matches what.

`llguidance` is imported here alone, and not before a request needs it.
"""
