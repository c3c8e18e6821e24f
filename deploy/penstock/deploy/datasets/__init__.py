"""Work of the commands `penstock data` on a dataset in a local folder."""
