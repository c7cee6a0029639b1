"""The life of one real request, told from what its client saw: `noria chat --explain`."""
