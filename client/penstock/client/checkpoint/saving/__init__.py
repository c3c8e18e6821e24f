"""The way of a save: plan, copy to shared memory, write."""
