"""`penstock replay`: a batch that was delivered, made again."""
