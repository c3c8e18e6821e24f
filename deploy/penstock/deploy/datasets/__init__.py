"""What the commands `penstock data` do with a dataset in a local folder."""
