"""The coordinator as a state machine, without I/O."""
