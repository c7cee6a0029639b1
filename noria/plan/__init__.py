"""Sizing: what a model needs, what a card holds, how many replicas a load takes."""
