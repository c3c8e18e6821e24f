"""Order of an epoch's samples, partition of its batches among workers, and each worker's position."""
