"""Where commands enter the loop over HTTP and queries leave it."""
