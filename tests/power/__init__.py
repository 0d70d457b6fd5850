"""Power cuts of real file systems: requests are recorded at a block device of our own, disk images are built from them,
mounted and recovered.

    fuse.py          a file served through /dev/fuse, which keeps each write
    system.py        mounts, loop devices, the kernel's trace: the parts that need root
    requests.py      the requests of a recording, in the order of the kernel's trace
    cuts.py          the requests that a power cut may lose, and the images that it may leave
    file_systems.py  making, mounting and checking each file system
    workloads.py     programs that use a store, and write their acknowledgements to the trace
    record.py        a workload on a file system on the device
    evaluate.py         an image mounted and recovered, compared with the acknowledged states
    run.py           cuts of all workloads on all file systems, counted; `python -m tests.power`

docs/power.md defines a cut, and has the results.
"""
