"""The only door to torch.distributed: runs a program."""
