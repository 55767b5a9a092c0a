"""The names that code written for `mooncake` imports. Every module here only re-exports them."""

from mooncake_backend import __version__ as __version__
