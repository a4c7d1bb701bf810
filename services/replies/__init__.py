"""Where the log is followed for what branches owe one another, and that is delivered."""
