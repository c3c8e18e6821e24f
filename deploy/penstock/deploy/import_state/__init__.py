"""`penstock import-state`: a position of another library becomes a state of Penstock."""
