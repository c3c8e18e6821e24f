"""What `penstock.deploy` may use of a worker, to run users' loaders outside of one: these two modules and no other."""
