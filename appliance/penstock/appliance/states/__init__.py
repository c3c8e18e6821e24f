"""State of a run at a step: collected from the run's slots, kept for a while, sent in parts."""
