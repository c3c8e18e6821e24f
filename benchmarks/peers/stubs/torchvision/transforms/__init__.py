"""Stand-in for torchvision.transforms."""
