"""The API of a training job: appliances, loaders and executors."""
