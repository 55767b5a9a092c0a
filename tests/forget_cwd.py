"""The first module that the server of ranks imports. Python has put the current folder before all
others there: the clone, which has the sources of mooncake_backend and may have no build of it."""

import sys

sys.path[:] = [path for path in sys.path if path]
