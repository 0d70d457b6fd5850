import os

# Threads of OpenMP and of OpenBLAS wait by spinning, and tests run side by side. The libraries read this as they load.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # the least: 2 ** 4 cycles
