"""Changes of the weights of a run's mixture in mid-run (`penstock mix`)."""
