"""The program behind --run-path: runs a script in this interpreter, and records its exception in
the error file.

torchrun would call a function in processes that wait for each other at their end. Ranks that may
die must be independent processes.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import run_script_path

if __name__ == "__main__":
    record(run_script_path)(*sys.argv[1:])
