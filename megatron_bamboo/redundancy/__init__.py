"""Replicas of the successor's stage."""
