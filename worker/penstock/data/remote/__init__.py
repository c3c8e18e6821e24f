"""Access to remote folders of data on web servers, object stores and other filesystems."""
