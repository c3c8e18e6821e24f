"""Save of a checkpoint: plan, copy to shared memory, write."""
