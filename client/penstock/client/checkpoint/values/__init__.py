"""What a checkpoint holds: named tensors, optimizers' states, plain values and other objects."""
