"""Many requests from a file: each asked once, whatever interrupts the work."""
