"""What callers show: tokens and the proof of them, the roles they are good for, and lane tickets."""
