"""What a model is, read from its config or header alone: for who loads it and for planning."""
