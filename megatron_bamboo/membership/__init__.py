"""Who lives, and the small store that everyone agrees through."""
