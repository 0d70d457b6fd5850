"""Power cuts of real file systems: recorded at a block device of our own, built anew, mounted, recovered.

    fuse.py          a file served through /dev/fuse, which keeps each write
    system.py        mounts, loop devices, the kernel's trace: what needs root
    requests.py      the requests of a recording, in the order of the kernel's trace
    cuts.py          which of them a power cut may have lost, and the images that it may leave
    file_systems.py  how each file system is made, mounted and checked
    workloads.py     what programs do with a store, telling the trace what was acknowledged
    record.py        a workload on a file system on the device
    judge.py         an image mounted and recovered, compared with what was acknowledged
    run.py           cuts of all workloads on all file systems, counted; `python -m tests.power`

docs/power.md says what a cut is, and what came of it.
"""
