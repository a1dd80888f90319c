"""Rehearsing losses: faults on purpose, and whether a run stands them as it should."""
