"""No deadline for a single example: other work on the machine must not fail a test."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
