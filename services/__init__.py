"""The edges of the loop: one process each, and none imports another."""
