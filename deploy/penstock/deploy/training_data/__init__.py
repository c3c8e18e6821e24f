"""What a run was trained on: counts in saved states, and the samples of loss spikes."""
