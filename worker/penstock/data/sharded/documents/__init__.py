"""Documents of tokens, and rows that are made of them."""
