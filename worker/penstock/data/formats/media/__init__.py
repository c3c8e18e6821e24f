"""Images in datasets: their encodings, and the libraries that decode them."""
