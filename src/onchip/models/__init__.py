"""Models: one decoder, a table of families, and what it takes to read them from disk."""
