"""The worker daemon: registers, supervises slots, sends batches. It never runs user code."""
