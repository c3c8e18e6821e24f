"""In which order an epoch's samples come, who makes which batch, and where each worker stands."""
