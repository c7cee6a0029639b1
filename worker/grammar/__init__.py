"""Keeping an output inside a grammar: what is asked for, its compiler, and who matches what.

`llguidance` is imported here alone, and only where a grammar may be compiled.
"""
