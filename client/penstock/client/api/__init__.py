"""What a training job calls: the appliance, loaders, the executor, and what belongs to them."""
