"""The training job: an ordinary iterator that can be saved at any step and resumed exactly."""
