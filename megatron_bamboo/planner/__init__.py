"""Who holds and runs what, from one epoch on: pure functions over plans."""
