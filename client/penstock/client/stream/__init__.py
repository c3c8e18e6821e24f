"""A box's batches on their way to the training loop: lanes, order, devices."""
