"""Remote folders of data: web servers, object stores, filesystems."""
