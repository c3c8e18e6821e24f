"""Images, videos and sounds in datasets: encodings of images, clips, and the libraries that decode them."""
