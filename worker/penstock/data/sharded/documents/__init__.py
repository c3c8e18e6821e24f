"""Documents of tokens, and the rows of fixed length that Packed makes of them."""
