"""Contents of a checkpoint: named tensors, optimizers' states, plain values and other objects."""
