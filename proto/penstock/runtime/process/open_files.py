"""Limit of a process's open descriptors."""

from __future__ import annotations

import logging
import resource

FILES_MAX = 1 << 20
"""Largest limit of open descriptors to set: some libraries allocate tables as large as the limit."""
OWN_FILES = 64
"""Descriptors that a server keeps for its files and threads: it needs some 50."""

log = logging.getLogger("penstock.files")


def raise_file_limit() -> None:
    """Raise this process's limit of open descriptors as far as the system allows, because each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("raised the limit of open files from %d to %d", soft, wanted)


def connections_max() -> int:
    """Return how many connections a server may have, so that it can still open its files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES_MAX if soft == resource.RLIM_INFINITY else min(soft, FILES_MAX)
    return max(1, files - max(OWN_FILES, files // 8))
