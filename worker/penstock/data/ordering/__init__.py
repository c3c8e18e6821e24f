"""Order of an epoch's samples, partition of its batches among workers, and the position of each worker."""
