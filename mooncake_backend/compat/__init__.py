"""The names that code written for `mooncake` imports; every module here only re-exports."""

from mooncake_backend import __version__ as __version__
