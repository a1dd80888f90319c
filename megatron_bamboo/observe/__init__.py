"""What happened: events, and the comparison of two runs."""
