"""What follows a loss or an arrival: which of the answers that there are, and why."""
