"""Folders of data that lie elsewhere: web servers, object stores, file systems."""
