"""State of a run at a step: collected from its slots, kept for a while, sent in parts."""
