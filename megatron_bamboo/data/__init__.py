"""Text in, microbatches out."""
