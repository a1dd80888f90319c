"""Plays a trace of spot nodes against policies: what each would have made of it."""
