"""Evaluations during the training: which there are, and what comes of one. Without torch."""
