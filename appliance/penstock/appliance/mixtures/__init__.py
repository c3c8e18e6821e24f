"""Changes of the weights of a run's mixture while the run is open (`penstock mix`)."""
