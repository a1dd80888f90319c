"""Saving the training's state and going on from it: whole, or not there."""
