"""What a training script that was written for Megatron-LM brings with it, and asks for."""
