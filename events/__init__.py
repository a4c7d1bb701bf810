"""The write side: a command is decided here and appended to the log as events."""
