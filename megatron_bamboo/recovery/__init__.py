"""What to do after a loss, and doing it."""
