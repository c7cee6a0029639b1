"""What router and tokenizer add: a worker that computes nothing, and clients that time it."""
