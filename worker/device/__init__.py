"""Steps on a device that computes behind the host's back: nothing here waits for it.

What a launch does is decided from numbers that the host has; ids stay on the device for the
step after, and come to the host when they are collected.
"""
