"""The read side: folds the log into disposable views and answers queries from them."""
