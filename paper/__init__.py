"""The experiment of "Towards Fast Crash-Consistent Cluster Checkpointing" (IEEE HPEC 2022), done again.

`make paper` runs it; docs/paper.md has the results.
"""

import os

# OpenMP's threads wait by spinning, which takes the processor from the process that syncs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
