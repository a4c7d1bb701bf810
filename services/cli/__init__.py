"""The loop from a terminal: the plait command."""
