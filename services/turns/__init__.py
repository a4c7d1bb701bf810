"""Where queued turns run: claim, model, tools, and back to the log as commands."""
