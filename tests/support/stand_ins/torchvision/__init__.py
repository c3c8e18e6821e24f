"""What the recipe of images uses of torchvision, for tests: PyPI's build does not load beside torch's CPU build."""
