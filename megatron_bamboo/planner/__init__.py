"""Who runs and holds what: plans as immutable data, and pure functions from plan to plan."""
