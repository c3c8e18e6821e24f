"""The wall clock of every process jumps by days, forwards and back: leases are measured by another one."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path

import streams
from cluster import running

from penstock.client import DataExecutor, DataLoader

JUMPS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

/* Seconds by which the wall clock is wrong: the content of the file that CLOCK_JUMP names. */
static long jump(void) {
    long by = 0;
    const char *name = getenv("CLOCK_JUMP");
    FILE *file = name ? fopen(name, "r") : NULL;
    if (file) {
        if (fscanf(file, "%ld", &by) != 1) by = 0;
        fclose(file);
    }
    return by;
}

int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, at);
    if (!failed && which == CLOCK_REALTIME) at->tv_sec += jump();
    return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
DAY_S = 86_400


def test_a_clock_that_jumps_is_not_noticed(tmp_path: Path) -> None:
    source, library, clock = tmp_path / "jumps.c", tmp_path / "jumps.so", tmp_path / "clock"
    source.write_text(JUMPS)
    clock.write_text("0")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)

    def jump_to(seconds: int) -> None:
        new = tmp_path / "new"
        new.write_text(str(seconds))
        new.rename(clock)

    surroundings = {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(clock)}
    jump_to(DAY_S)
    shown = subprocess.run(
        ["date", "+%s"], env={**os.environ, **surroundings}, capture_output=True, text=True, check=True
    )
    plain = subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True)
    assert abs(int(shown.stdout) - int(plain.stdout) - DAY_S) < 60, "the library does what it is for"
    jump_to(0)
    with (
        running(tmp_path / "state", **surroundings) as cluster,
        warnings.catch_warnings(),
        cluster.box("job", timeout_s=30) as appliance,
    ):
        warnings.simplefilter("error")
        cluster.add_worker(2, name="w")
        loader = DataLoader(streams.slow, 0.02, 120)
        executor = DataExecutor(loader, num_steps=180, appliance=appliance)
        at = {20: 2 * DAY_S, 70: -2 * DAY_S, 120: 30 * DAY_S}
        got = []
        for batch in executor:
            got.append(int(batch))
            if executor.step in at:
                jump_to(at[executor.step])
        assert executor.stats.recoveries == 0
    assert got == [number for number in range(90) for _ in range(2)]
