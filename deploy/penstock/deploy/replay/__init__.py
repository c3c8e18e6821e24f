"""`penstock replay`: recreates a delivered batch."""
