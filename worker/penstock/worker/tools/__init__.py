"""Modules with which `penstock doctor` and `penstock replay` run users' loaders outside of a worker. Apart from these
modules, `penstock.deploy` imports from the worker only what starts a daemon.
"""
