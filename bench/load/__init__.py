"""A load generator for chat servers: what to ask, when, of whom, and what came of it."""
