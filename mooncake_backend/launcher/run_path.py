"""What --run-path starts: a script inside this interpreter, its exception in the error file.

torchrun starts a function for it, whose processes wait for each other at their end. Ranks that may
die are processes of their own.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import run_script_path

if __name__ == "__main__":
    record(run_script_path)(*sys.argv[1:])
