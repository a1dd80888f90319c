"""Resilient pretraining with Megatron-core on nodes that can vanish at any moment."""

__version__ = "0.1.0"
