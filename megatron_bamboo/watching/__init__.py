"""Looking on while a job runs: what its store holds, as a table for people and as metrics."""
