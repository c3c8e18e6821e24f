"""Kind of the filesystem that holds a path."""

from __future__ import annotations

from pathlib import Path

NETWORK = {"afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3"}
NETWORK |= {"smbfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs", "fuse.gcsfuse"}
"""Types of network filesystems, as named in /proc/self/mountinfo, on which SQLite's write-ahead log is not safe."""


def filesystem(path: Path, mounts: str) -> str:
    """Type of the filesystem that holds `path`, such as "ext4", by the text of /proc/self/mountinfo."""
    best, kind = "", ""
    where = str(path.resolve())
    for line in mounts.splitlines():
        fields, _, after = line.partition(" - ")
        point = fields.split(" ")[4].encode().decode("unicode_escape")  # spaces are escaped as \040
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind
