"""Stream of a box's batches to the training loop: lanes, order, devices."""
