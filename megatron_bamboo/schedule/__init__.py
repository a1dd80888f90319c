"""The schedule as data: pure passes over lists of actions."""
