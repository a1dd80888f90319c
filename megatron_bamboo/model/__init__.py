"""The only door to Megatron's models, optimizers and schedulers."""
